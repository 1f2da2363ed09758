"""The line of rollouts that are to be done: those whose image is there."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task

if TYPE_CHECKING:
    from minisandbox.images import Image

STAGES = ("queued", "image", "sandbox", "agent", "grade", "ended")
"""Where a rollout of a batch can be."""


@dataclass(slots=True, eq=False)
class Job:
    """One rollout that is to be done, and how far it is.

    Attributes:
        task: the task.
        attempt: which rollout of it.
        since: when it began to wait, by :func:`time.monotonic`.
        image: its image, once that is there.
        image_seconds: what waiting for that took.
        stage: one of :data:`STAGES`.
        moves: how many nodes were lost while it was there.
        draw: how its answers are drawn, where that is its own.
    """

    task: Task
    attempt: int
    since: float = field(default_factory=time.monotonic)
    image: Image | None = None
    image_seconds: float = 0.0
    stage: str = "queued"
    moves: int = 0
    draw: Draw | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What it is called."""
        return self.task.instance_id, self.attempt


class Line:
    """Jobs in line, first come, first served.

    Args:
        most: how many may wait before no more are brought.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: deque[Job] = deque()
        self._there = asyncio.Semaphore(0)
        self._taken = asyncio.Event()
        self._over = False

    def put(self, jobs: Iterable[Job]) -> None:
        """Let jobs stand in line."""
        for job in jobs:
            if not self._over:
                self._jobs.append(job)
                self._there.release()

    def next(self, count: int) -> list[Job]:
        """Return those in front, without taking them."""
        return list(islice(self._jobs, count))

    async def take(self) -> Job | None:
        """Return the one in front when there is one; None when no more will come."""
        while True:
            await self._there.acquire()
            if self._jobs:
                self._taken.set()
                return self._jobs.popleft()
            if self._over:  # else the one that was told of has been withdrawn
                self._there.release()  # the others are to find out too
                return None

    def withdraw(self, most: int) -> list[Job]:
        """Return some of those at the end; they are in line no more."""
        return [self._jobs.pop() for _ in range(min(most, len(self._jobs)))]

    async def room(self) -> bool:
        """Wait until there is room for more; returns whether more are wanted at all."""
        while not self._over and len(self._jobs) >= self._most:
            self._taken.clear()
            await self._taken.wait()
        return not self._over

    def end(self, *, clear: bool = False) -> None:
        """Tell that no more will come.

        Args:
            clear: whether those in line are sent away.
        """
        if clear:
            self._jobs.clear()
        if not self._over:
            self._over = True
            self._there.release()
        self._taken.set()
