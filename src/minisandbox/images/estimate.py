"""How much building is left, from what the store's layers took to make."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from minisandbox.images.plan import PlannedStep
from minisandbox.store import Store

# Where the store has no layer of a kind yet; measured on two quiet cores.
_GUESSES = {"system": 60.0, "python_copy": 15.0, "python_venv": 5.0, "requirements": 10.0, "install": 3.0, "git": 5.0}
_GUESS = 1.0


@dataclass(slots=True)
class Estimate:
    """How much is left.

    Attributes:
        steps: how many steps were to be made.
        left: how many still are.
        seconds: about how long that takes.
    """

    steps: int
    left: int
    seconds: float
    _each: dict[str, float] = field(default_factory=dict, repr=False)
    _workers: int = field(default=1, repr=False)

    @classmethod
    def of(cls, store: Store, steps: Iterable[PlannedStep], workers: int) -> Self:
        """Estimate what making some steps takes.

        Args:
            store: whose layers tell what steps of a kind took: the median.
            steps: those to be made.
            workers: how many run at once.
        """
        planned = list(steps)
        typical = _typical(store) if planned else {}
        each = {one.key: _seconds(str(one.step.definition.get("kind")), typical) for one in planned}
        return cls(len(each), len(each), sum(each.values()) / workers, each, workers)

    def done(self, key: str) -> None:
        """A step is made, or will not be."""
        if (seconds := self._each.pop(key, None)) is not None:
            self.left -= 1
            self.seconds = max(self.seconds - seconds / self._workers, 0.0)

    def copy(self) -> Estimate:
        """Return the estimate as it is now."""
        return Estimate(self.steps, self.left, self.seconds)


def _typical(store: Store) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for record in store.layers():
        seconds.setdefault(str(record.step.get("kind")), []).append(record.seconds)
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def _seconds(kind: str, typical: Mapping[str, float]) -> float:
    return typical.get(kind, _GUESSES.get(kind, _GUESS))
