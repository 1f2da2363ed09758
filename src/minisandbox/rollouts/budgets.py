"""What a batch may take, and what it tells."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from minisandbox.errors import InvalidValue
from minisandbox.rollouts.summary import Summary


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How many of each go on at once. A model has a budget of calls of its own.

    Attributes:
        workers: agents, each in its sandbox.
        builds: images that are being built.
        starts: sandboxes that are being made.
        gradings: submissions that are being graded, beside the agents.
        warm: sandboxes that are made ahead for the rollouts that are next.
    """

    workers: int = 1
    builds: int = field(default_factory=_cpus)
    starts: int = field(default_factory=lambda: 2 * _cpus())
    gradings: int = field(default_factory=_cpus)
    warm: int = 2

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name == "warm" else 1
            if type(value) is not int or value < least:
                raise InvalidValue(f"{name} is {value!r}", hint=f"give {least} or more")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a batch tells when a rollout has ended.

    Attributes:
        done: rollouts that have ended, those of earlier batches included.
        total: rollouts of the whole batch.
        latest: the one that ended just now.
        seconds_left: an estimate; None while none has ended in this batch.
    """

    done: int
    total: int
    latest: Summary
    seconds_left: float | None = None
