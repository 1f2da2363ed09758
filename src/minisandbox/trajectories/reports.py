"""Reports: what a stage of the data's way kept, and what it dropped and why. Every stage has the same form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.trajectories.codec import to_json
from minisandbox.trajectories.example import Example

FORMAT = "minisandbox-data-report"
VERSION = 1
"""Of the file format."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example that a stage did not keep.

    Attributes:
        traj_id: its name.
        instance_id: its task.
        reason: why, as a word that programs can compare.
        detail: the same in a few words, with the numbers that decided.
        source: the run or the file that it comes from.
    """

    traj_id: str
    instance_id: str
    reason: str
    detail: str
    source: str = ""


@dataclass(slots=True)
class Report:
    """What one stage did. Counts always add up: read = kept + dropped.

    Attributes:
        stage: ``collect``, ``filter``, ``balance`` or ``export``.
        rules: the options that it worked by.
        read: examples that came in.
        kept: examples that went out.
        dropped: the others, in their order.
        notes: counts of what else people should know.
    """

    stage: str
    rules: Mapping[str, object] = field(default_factory=dict)
    read: int = 0
    kept: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    _instances: dict[str, int] = field(default_factory=dict)

    def keep(self, example: Example) -> None:
        """Count an example that is kept."""
        self.read += 1
        self.kept += 1
        self._instances[example.instance_id] = self._instances.get(example.instance_id, 0) + 1

    def drop(self, example: Example, reason: str, detail: str) -> None:
        """Note an example that is not kept."""
        self.read += 1
        self._instances.setdefault(example.instance_id, 0)
        self.dropped.append(Dropped(example.traj_id, example.instance_id, reason, detail, example.source))

    @property
    def reasons(self) -> dict[str, int]:
        """How many were dropped for each reason, the commonest first."""
        return dict(Counter(one.reason for one in self.dropped).most_common())

    @property
    def instances(self) -> tuple[int, int]:
        """How many tasks examples came in for, and for how many one was kept."""
        return len(self._instances), sum(count > 0 for count in self._instances.values())

    @property
    def per_instance(self) -> dict[int, int]:
        """How many tasks have how many examples now: 0 for those that lost all."""
        return dict(sorted(Counter(self._instances.values()).items()))

    def to_json(self) -> dict[str, object]:
        """Return it as its file has it."""
        came, left = self.instances
        return {
            "format": FORMAT,
            "version": VERSION,
            "stage": self.stage,
            "rules": to_json(self.rules),
            "read": self.read,
            "kept": self.kept,
            "reasons": self.reasons,
            "instances": {"read": came, "kept": left},
            "examples_per_instance": {str(count): many for count, many in self.per_instance.items()},
            "notes": dict(self.notes),
            "dropped": to_json(self.dropped),
        }

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            OSError: it cannot be written.
        """
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="ascii")


def report_path(out: Path) -> Path:
    """Return where the report of what was written lies: beside it, ``NAME.report.json``."""
    return out.with_name(f"{out.name.removesuffix('.jsonl').removesuffix('.parquet')}.report.json")
