"""Concurrency limits of a batch of rollouts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from minisandbox.errors import InvalidValue


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Concurrency limits of a batch. :class:`.ModelOptions` limits the concurrent requests to a model.

    Attributes:
        workers: maximum concurrent agents, each in its own sandbox.
        builds: maximum concurrent image builds.
        starts: maximum sandboxes that are created concurrently.
        gradings: maximum submissions that are graded concurrently, in addition to the running agents.
        warm: the number of sandboxes to create in advance for the next rollouts.
    """

    workers: int = 1
    builds: int = field(default_factory=_cpus)
    starts: int = field(default_factory=lambda: 2 * _cpus())
    gradings: int = field(default_factory=_cpus)
    warm: int = 2

    def __post_init__(self) -> None:
        """Check that the limits are integers in range."""
        for name in self.__slots__:
            value, minimum = getattr(self, name), 0 if name == "warm" else 1
            if type(value) is not int or value < minimum:
                raise InvalidValue(f"{name} is {value!r}", hint=f"give {minimum} or more")
