"""Concurrency limits of a batch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from minisandbox.errors import InvalidValue


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Concurrency limits of a batch. Calls to a model have their own budget.

    Attributes:
        workers: agents at once, each in its own sandbox.
        builds: images built at once.
        starts: sandboxes created at once.
        gradings: submissions graded at once, in addition to the agents.
        warm: sandboxes created ahead for the next rollouts.
    """

    workers: int = 1
    builds: int = field(default_factory=_cpus)
    starts: int = field(default_factory=lambda: 2 * _cpus())
    gradings: int = field(default_factory=_cpus)
    warm: int = 2

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in self.__slots__:
            value, minimum = getattr(self, name), 0 if name == "warm" else 1
            if type(value) is not int or value < minimum:
                raise InvalidValue(f"{name} is {value!r}", hint=f"give {minimum} or more")
