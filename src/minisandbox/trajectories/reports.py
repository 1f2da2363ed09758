"""Report a data stage (collect, filter, balance, export): its counts, and why each dropped example was dropped."""

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
"""The version of the file format."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example that a stage dropped.

    Attributes:
        traj_id: the example's id.
        instance_id: the task's id.
        reason: a machine-readable reason.
        detail: a short explanation, with the compared numbers.
        source: the run or file that contained the example.
    """

    traj_id: str
    instance_id: str
    reason: str
    detail: str
    source: str = ""


@dataclass(slots=True)
class StageReport:
    """Counts of one data stage: read = kept + dropped.

    Attributes:
        stage: ``collect``, ``filter``, ``balance`` or ``export``.
        rules: the stage's options.
        read: the number of examples read.
        kept: the number of examples kept.
        dropped: the dropped examples, in order.
        notes: further counts, each by its description.
    """

    stage: str
    rules: Mapping[str, object] = field(default_factory=dict)
    read: int = 0
    kept: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    _instances: dict[str, int] = field(default_factory=dict)

    def keep(self, example: Example) -> None:
        """Count a kept example."""
        self.read += 1
        self.kept += 1
        self._instances[example.instance_id] = self._instances.get(example.instance_id, 0) + 1

    def drop(self, example: Example, reason: str, detail: str) -> None:
        """Record a dropped example."""
        self.read += 1
        self._instances.setdefault(example.instance_id, 0)
        self.dropped.append(Dropped(example.traj_id, example.instance_id, reason, detail, example.source))

    @property
    def reasons(self) -> dict[str, int]:
        """The number of dropped examples per reason, most frequent first."""
        return dict(Counter(dropped.reason for dropped in self.dropped).most_common())

    @property
    def instances(self) -> tuple[int, int]:
        """The number of tasks with at least one example read, and with at least one example kept."""
        return len(self._instances), sum(count > 0 for count in self._instances.values())

    @property
    def per_instance(self) -> dict[int, int]:
        """The number of tasks by how many of their examples were kept, including 0."""
        return dict(sorted(Counter(self._instances.values()).items()))

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON object, in its file format."""
        read_count, kept_count = self.instances
        return {
            "format": FORMAT,
            "version": VERSION,
            "stage": self.stage,
            "rules": to_json(self.rules),
            "read": self.read,
            "kept": self.kept,
            "reasons": self.reasons,
            "instances": {"read": read_count, "kept": kept_count},
            "examples_per_instance": {str(count): tasks for count, tasks in self.per_instance.items()},
            "notes": dict(self.notes),
            "dropped": to_json(self.dropped),
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="ascii")


def report_path(out: Path) -> Path:
    """Return the path of the report of an output file: ``NAME.report.json``, next to the output."""
    return out.with_name(f"{out.name.removesuffix('.jsonl').removesuffix('.parquet')}.report.json")
