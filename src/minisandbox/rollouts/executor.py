"""What does rollouts on one node: its images, its sandboxes, its agents and its graders."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from minisandbox.errors import (
    BadAnswer,
    BudgetExceeded,
    HostError,
    InvalidValue,
    MiniSandboxError,
    ModelRefused,
    ModelUnavailable,
    NotFound,
    SandboxGone,
)
from minisandbox.pool import Threads, WarmPool
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.draft import Draft
from minisandbox.rollouts.line import Job, Line
from minisandbox.rollouts.rollout import finish, make_box, unreached, work
from minisandbox.rollouts.setup import Setup
from minisandbox.sandbox import AsyncSandbox
from minisandbox.tasks import Task
from minisandbox.trajectories import Failure

if TYPE_CHECKING:
    from minisandbox.images import Image


Done_contra = TypeVar("Done_contra", contravariant=True)


class Office(Protocol[Done_contra]):
    """Who has work done: it keeps what comes of it, and says when it is over."""

    async def ended(self, job: Job, done: Done_contra, /) -> None:
        """Keep what came of a job that has ended."""

    def end_by(self, error: Exception) -> None:
        """Let what is under way be finished, and then raise an error."""


class Crew(Protocol):
    """What does the rollouts of a batch: one node, or many."""

    async def run(self, todo: list[Job], office: Office[Packed]) -> None:
        """Do rollouts, until all have ended or those under way have after :meth:`drain`."""

    def drain(self) -> None:
        """Begin no more rollouts."""

    async def close(self) -> None:
        """Stop what was made ahead."""


class Executor:
    """One node. Used once, on one event loop: by :meth:`run`, or by :meth:`serve` and :meth:`put`.

    Args:
        setup: who works, with what model, within which bounds.
        budgets: how many of each go on at once.
        image_of: returns a task's image; called in several threads, once for each task.
        tries: how often a rollout is tried at most, where it fails on our side.
        pause: seconds before the second try; doubled for each one more.
        jitter: seconds over which the first rollouts begin, each at a random moment.
    """

    def __init__(
        self,
        setup: Setup,
        budgets: Budgets,
        *,
        image_of: Callable[[Task], Image],
        tries: int = 3,
        pause: float = 1.0,
        jitter: float = 0.0,
    ) -> None:
        self._setup, self._budgets, self._image_of = setup, budgets, image_of
        self._tries, self._pause, self._jitter = tries, pause, jitter
        self._answered = False
        self._draining = False
        self._line = Line(4 * budgets.workers)
        self._room = asyncio.Semaphore(budgets.workers + 2 * budgets.gradings)
        self._warm: WarmPool[tuple[str, int]] = WarmPool(budgets.warm, budgets.starts)
        self._builders = Threads(budgets.builds, "image")
        self._graders = Threads(budgets.gradings, "grade")
        self._packer = Threads(1, "pack")

    async def run(self, todo: list[Job], office: Office[Packed]) -> None:
        """Make the images of rollouts, and do them."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._provide_images(todo, office))
            await self.serve(office, len(todo))

    async def serve(self, office: Office[Packed], most: int | None = None) -> None:
        """Do the rollouts that stand in line, until no more come.

        Args:
            office: who keeps them.
            most: how many there are in all, if that is known.
        """
        count = self._budgets.workers if most is None else min(self._budgets.workers, most)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._work(office, group))

    def put(self, jobs: list[Job]) -> None:
        """Let rollouts stand in line whose image is there."""
        self._line.put(jobs)
        self._make_ahead()

    def withdraw(self, most: int) -> list[Job]:
        """Take rollouts out of the line again, the last first.

        Args:
            most: how many.
        """
        return self._line.withdraw(most)

    def drain(self) -> None:
        """Begin no more rollouts."""
        self._draining = True
        self._line.end(clear=True)

    async def close(self) -> None:
        """Stop what was made ahead."""
        await self._warm.close()
        for threads in (self._builders, self._graders, self._packer):
            threads.close()

    # --- images ------------------------------------------------------------------------------------------------------

    async def _provide_images(self, todo: list[Job], office: Office[Packed]) -> None:
        """Have images made, each once and not too far ahead; the rollouts of each stand in line when it is there."""
        groups: dict[str, list[Job]] = {}
        for job in todo:
            groups.setdefault(job.task.instance_id, []).append(job)
        slots = asyncio.Semaphore(self._budgets.builds)
        async with asyncio.TaskGroup() as group:
            for jobs in groups.values():
                await slots.acquire()
                if not await self._line.room():
                    break
                group.create_task(self._provide(jobs, slots, office))
        self._line.end()

    async def _provide(self, jobs: list[Job], slots: asyncio.Semaphore, office: Office[Packed]) -> None:
        began = time.monotonic()
        for job in jobs:
            job.stage = "image"
        try:
            image = await self.image(jobs[0].task)
        except MiniSandboxError as error:
            for job in jobs:
                times = {"queued": began - job.since, "image": time.monotonic() - began}
                one = unreached(job.task, self._setup, job.attempt, error, waited=times)
                await office.ended(job, await self._packer.run(pack, one))
        except Exception as error:  # noqa: BLE001 - a mistake: what runs is finished, then it is raised
            office.end_by(error)
        else:
            for job in jobs:
                job.image, job.image_seconds, job.stage = image, time.monotonic() - began, "queued"
            self.put(jobs)
        finally:
            slots.release()

    async def image(self, task: Task) -> Image:
        """Return a task's image, made if it is not there."""
        return await self._builders.run(self._image_of, task)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    async def _work(self, office: Office[Packed], group: asyncio.TaskGroup) -> None:
        """Do one rollout after another: one of the workers."""
        if self._jitter:
            await asyncio.sleep(random.uniform(0.0, self._jitter))  # noqa: S311 - it spreads the load
        while (job := await self._line.take()) is not None:
            self._make_ahead()
            await self._room.acquire()  # where grading is slower than agents are, they wait
            draft = await self._attempted(job, office)
            group.create_task(self._conclude(job, draft, office))

    def _make_ahead(self) -> None:
        """Make sandboxes for the rollouts that are next."""
        for job in self._line.next(self._budgets.warm):
            if self._draining or not self._warm.expect(job.key, lambda one=job: self._new_box(one)):  # type: ignore[misc] # this round's
                return

    async def _new_box(self, job: Job) -> AsyncSandbox:
        assert job.image is not None
        return await make_box(job.image, self._setup.limits)

    async def _attempted(self, job: Job, office: Office[Packed]) -> Draft:
        """Let the agent work, again where we fail; returns what came of the last try."""
        tries: tuple[Failure, ...] = ()
        times = {"queued": time.monotonic() - job.since, "image": job.image_seconds}
        setup = self._setup if job.draw is None else job.draw.of(self._setup)
        assert job.image is not None

        async def take_box() -> AsyncSandbox:
            box = await self._warm.take(job.key, lambda: self._new_box(job))
            job.stage = "agent"
            return box

        while True:
            job.stage = "sandbox"
            draft = Draft(job.task, (job.image.name, job.image.key), setup, job.attempt, tries=tries, waited=times)
            await work(draft, take_box)
            self._look_at(draft, office)
            if draft.failure is None or not self._worth_another(draft):
                return draft
            tries = (*tries, draft.failure)
            await asyncio.sleep(self._pause * 2 ** (len(tries) - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - as above

    def _look_at(self, draft: Draft, office: Office[Packed]) -> None:
        """End the batch where none of its rollouts can go on."""
        if draft.session is not None and draft.session.record.turns:
            self._answered = True
        if isinstance(draft.error, BudgetExceeded) or (isinstance(draft.error, ModelRefused) and not self._answered):
            office.end_by(draft.error)

    def _worth_another(self, draft: Draft) -> bool:
        """Whether what failed may go well the next time."""
        assert draft.failure is not None
        if self._draining or len(draft.tries) + 1 >= self._tries or isinstance(draft.error, InvalidValue | NotFound):
            return False
        if draft.failure.phase in ("sandbox", "patch"):
            return True
        return isinstance(draft.error, HostError | SandboxGone | ModelUnavailable | BadAnswer)

    async def _conclude(self, job: Job, draft: Draft, office: Office[Packed]) -> None:
        """Grade a rollout whose agent has ended, and have it kept."""
        job.stage = "grade"
        image = job.image
        assert image is not None
        try:
            # what has nothing to grade does not wait for what has
            threads = self._graders if draft.failure is None else self._packer
            packed = await threads.run(lambda: pack(finish(draft, image, tries=self._tries)))
            await office.ended(job, packed)
        finally:
            self._room.release()
