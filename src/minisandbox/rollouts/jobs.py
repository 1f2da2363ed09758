"""Define jobs (one rollout or check each), and the queue of jobs whose image is ready."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.runs import Job as Check
from minisandbox.runs import Result
from minisandbox.tasks import Task

if TYPE_CHECKING:
    from minisandbox.images import Image

Key: TypeAlias = tuple[str, int]
"""The id of a job's task and the attempt."""

STAGES = ("queued", "image", "sandbox", "agent", "grade", "ended")
"""The stages of a job, in order."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check (the validation or evaluation of a task).

    Attributes:
        result: the result; None if an earlier result is still valid.
    """

    result: Result | None


Outcome: TypeAlias = Packed | Checked
"""The outcome of a job: the record of a rollout, or the outcome of a check."""


@dataclass(slots=True, eq=False)
class Job:
    """A pending or running rollout, or a check of a task on a cluster node.

    Attributes:
        task: the task.
        attempt: the index of the rollout among the task's rollouts, from 0.
        since: the time at which the job began to wait, from :func:`time.monotonic`.
        image: the task's image; None until the image is ready.
        image_seconds: seconds spent waiting for the image.
        stage: the current stage, from :data:`STAGES`.
        draw: sampling options for this rollout only; None for the options of the setup.
        check: the check; None for a rollout.
        earlier: the fingerprint of an earlier result of the check. If it is unchanged, the check is skipped.
        dropped: whether the job was cancelled, so that it need not start.
        retried: whether the job has been run again after an infrastructure error of its node or a missing image.
    """

    task: Task
    attempt: int
    since: float = field(default_factory=time.monotonic)
    image: Image | None = None
    image_seconds: float = 0.0
    stage: str = "queued"
    draw: Draw | None = None
    check: Check[Task] | None = None
    earlier: str | None = None
    dropped: bool = False
    retried: bool = False

    @property
    def key(self) -> Key:
        """The task's id and the attempt."""
        return self.task.instance_id, self.attempt


class JobQueue:
    """A first-in, first-out queue of jobs.

    Args:
        capacity: the number of waiting jobs at which :meth:`room` starts to block producers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._jobs: deque[Job] = deque()
        self._there = asyncio.Semaphore(0)
        self._taken = asyncio.Event()
        self._over = False

    def put(self, jobs: Iterable[Job]) -> None:
        """Add jobs, unless the queue is closed."""
        for job in jobs:
            if not self._over:
                self._jobs.append(job)
                self._there.release()

    def next(self, count: int) -> list[Job]:
        """Return the first ``count`` jobs without removing them."""
        return list(islice(self._jobs, count))

    async def take(self) -> Job | None:
        """Wait for the first job and remove it; return None once the queue is closed and empty."""
        while True:
            await self._there.acquire()
            if self._jobs:
                self._taken.set()
                return self._jobs.popleft()
            if self._over:
                self._there.release()  # wake the other waiters too
                return None

    async def room(self) -> bool:
        """Wait until fewer jobs than the capacity are waiting; return False once the queue is closed."""
        while not self._over and len(self._jobs) >= self._capacity:
            self._taken.clear()
            await self._taken.wait()
        return not self._over

    def end(self, *, clear: bool = False) -> None:
        """Close the queue, so that it accepts no more jobs.

        Args:
            clear: whether to drop the waiting jobs.
        """
        if clear:
            self._jobs.clear()
        if not self._over:
            self._over = True
            self._there.release()
        self._taken.set()
