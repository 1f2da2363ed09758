"""How much building is left, from what the store's layers took to make."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from minisandbox.images.runner import PlannedStep
from minisandbox.store import Store


class Cost(NamedTuple):
    """What a step takes: seconds, and bytes on disk."""

    seconds: float
    bytes: int


# Where the store has no layer of a kind yet; measured on two quiet cores.
_GUESSES = {
    "system": Cost(60.0, 150 << 20), "python_copy": Cost(15.0, 80 << 20), "python_venv": Cost(5.0, 1 << 20),
    "requirements": Cost(10.0, 60 << 20), "install": Cost(3.0, 5 << 20), "git": Cost(5.0, 40 << 20),
    "run": Cost(10.0, 20 << 20),
}  # fmt: skip
_GUESS = Cost(1.0, 1 << 20)


@dataclass(slots=True)
class Estimate:
    """How much is left.

    Attributes:
        steps: how many steps were to be made.
        left: how many still are.
        seconds: about how long that takes.
        bytes: about what that takes on disk.
    """

    steps: int
    left: int
    seconds: float
    bytes: int = 0
    _each: dict[str, Cost] = field(default_factory=dict, repr=False)
    _workers: int = field(default=1, repr=False)

    @classmethod
    def of(cls, store: Store, steps: Iterable[PlannedStep], workers: int) -> Self:
        """Estimate what making some steps takes.

        Args:
            store: its layers' times, by kind of step, give the median.
            steps: those to be made.
            workers: how many run at once.
        """
        planned = list(steps)
        typical = _typical(store) if planned else {}
        each = {one.key: _cost(str(one.step.definition.get("kind")), typical) for one in planned}
        seconds, size = sum(cost.seconds for cost in each.values()), sum(cost.bytes for cost in each.values())
        return cls(len(each), len(each), seconds / workers, size, each, workers)

    def cost(self, key: str) -> Cost:
        """Return what a step that is left takes."""
        return self._each.get(key, _GUESS)

    def done(self, key: str) -> None:
        """A step is made, or will not be."""
        if (cost := self._each.pop(key, None)) is not None:
            self.left -= 1
            self.seconds = max(self.seconds - cost.seconds / self._workers, 0.0)
            self.bytes -= cost.bytes

    def copy(self) -> Estimate:
        """Return the estimate as it is now."""
        return Estimate(self.steps, self.left, self.seconds, self.bytes)


def _typical(store: Store) -> dict[str, Cost]:
    costs: dict[str, list[Cost]] = {}
    for record in store.layers():
        costs.setdefault(str(record.step.get("kind")), []).append(Cost(record.seconds, record.bytes))
    return {
        kind: Cost(statistics.median(one.seconds for one in rows), int(statistics.median(one.bytes for one in rows)))
        for kind, rows in costs.items()
    }


def _cost(kind: str, typical: Mapping[str, Cost]) -> Cost:
    return typical.get(kind, _GUESSES.get(kind, _GUESS))
