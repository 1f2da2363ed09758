"""What was measured, as files: a directory per engine, a JSON file per quantity. An interrupted run resumes from it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something to measure.

    Attributes:
        name: what it is called, and its file.
        kind: which engines measure it: those that name it in ``measures``.
        rounds: how many samples to take from every engine, in alternation.
        arguments: what the worker is asked for.
        budget: seconds after which an engine gives no further sample.
    """

    name: str
    kind: str
    rounds: int
    arguments: Mapping[str, Any]
    budget: float


def plan(projects: Sequence[str], *, quick: bool) -> list[Quantity]:
    """Return what a run measures."""
    many, commands, rounds, budget = ((8,), 30, 1, 10.0) if quick else ((8, 32, 64, 128), 150, 3, 20.0)
    found: list[tuple[str, str, int, dict[str, Any]]] = [
        ("creation", "creation", 2 if quick else 8, {"count": 4 if quick else 5}),
        ("exec", "exec", rounds, {"count": 10 if quick else 30}),
        (f"rollout-{commands}", "rollout", rounds, {"commands": commands}),
        *((f"at-once-{count}", "at-once", rounds, {"count": count}) for count in many),
        *((f"validation-{name}", "validation", rounds, {"project": name}) for name in projects),
    ]
    return [Quantity(*one, budget) for one in found]


class Results:
    """The directory of a run.

    Args:
        directory: where; made if missing.
        about: what must be the same when a run resumes: the machine, the version, the plan.
        fresh: whether to discard what is there.

    Raises:
        ValueError: the directory has the results of another run.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any], *, fresh: bool = False) -> None:
        self._directory = directory
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        if self._read("run", about) != about:
            raise ValueError(f"{directory} has results of another version, machine or plan: use --fresh or another -o")
        self._write("run", about)

    def samples(self, engine: str, quantity: str) -> list[Sample]:
        """Return the samples so far."""
        found: list[Sample] = self._read(f"{engine}/{quantity}", [])
        return found

    def add(self, engine: str, quantity: str, sample: Sample) -> None:
        """Append a sample."""
        self._write(f"{engine}/{quantity}", [*self.samples(engine, quantity), sample])

    def status(self, engine: str) -> Sample:
        """Return an engine's ``version``, or why it ``failed`` to open; empty before it was opened."""
        found: Sample = self._read(f"{engine}/engine", {})
        return found

    def note(self, engine: str, status: Sample) -> None:
        """Record what :meth:`status` returns."""
        self._write(f"{engine}/engine", status)

    def owes(self, engine: str, quantity: Quantity) -> bool:
        """Whether a sample is missing: not after a failure, nor once the samples took longer than the budget."""
        samples = self.samples(engine, quantity.name)
        failed = any("failed" in one for one in [self.status(engine), *samples])
        return not failed and len(samples) < quantity.rounds and sum(one["took"] for one in samples) < quantity.budget

    def _read(self, name: str, default: Any) -> Any:
        file = self._directory / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else default

    def _write(self, name: str, content: object) -> None:
        file = self._directory / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".new").write_text(json.dumps(content, indent=1))
        os.replace(file.with_suffix(".new"), file)


def values(samples: Sequence[Sample], key: str) -> list[float]:
    """Return the numbers under a key of all samples, lists joined."""
    found = [sample[key] for sample in samples if sample.get(key) is not None]
    return [number for one in found for number in (one if isinstance(one, list) else [one])]


def percentile(numbers: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the two nearest numbers."""
    ordered, place = sorted(numbers), percent / 100 * (len(numbers) - 1)
    below = int(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


def paired_ratio(samples: Sequence[Sample], others: Sequence[Sample], key: str) -> float | None:
    """Return the median of the ratios of samples of the same round; None without a common round."""
    pairs = [(values([one], key), values([other], key)) for one, other in zip(samples, others, strict=False)]
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs if ours and theirs]
    return statistics.median(ratios) if ratios else None
