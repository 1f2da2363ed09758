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
    """

    workers: int = 1
    builds: int = field(default_factory=_cpus)
    starts: int = field(default_factory=lambda: 2 * _cpus())
    gradings: int = field(default_factory=_cpus)

    def __post_init__(self) -> None:
        """Check that the limits are integers in range."""
        for name in self.__slots__:
            if type(limit := getattr(self, name)) is not int or limit < 1:
                raise InvalidValue(f"{name} is {limit!r}", hint="give 1 or more")
