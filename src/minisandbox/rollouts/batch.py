"""Batches: many rollouts at once, resumable, and interruptible without losing what is finished."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

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
from minisandbox.rollouts.budgets import Budgets, Progress
from minisandbox.rollouts.draft import Draft
from minisandbox.rollouts.export import export_overview
from minisandbox.rollouts.line import STAGES, Job, Line
from minisandbox.rollouts.rollout import finish, make_box, unreached, work
from minisandbox.rollouts.rundir import Config, RunDirectory
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.summary import Summary
from minisandbox.sandbox import AsyncSandbox
from minisandbox.sandbox.aio_drive import in_thread
from minisandbox.sandbox.cancellation import Cancellation, CancelledError
from minisandbox.tasks import Task
from minisandbox.trajectories import Failure, Trajectory

if TYPE_CHECKING:
    from minisandbox.images import Building, Image

DRAIN = 60.0
"""Seconds that rollouts under way have to end when a batch is told to."""
_WRITING = 60.0
_ENDING = 30.0


class Batch:
    """Rollouts over tasks, many at once, each kept in a run directory as it ends. Used once, on one event loop.

    What is finished there already is skipped; what failed on our side is done again.

    Args:
        tasks: the tasks, in the order in which they are begun; those whose image is there go first.
        setup: who works, with what model, within which bounds.
        out: the run directory.
        image_of: returns a task's image; called in several threads, once for each task.
        images: begins to make the images of many tasks together, ``budgets.builds`` steps at once; in place of
            ``image_of``. What they share is made once.
        attempts: rollouts per task.
        budgets: how many of each go on at once.
        tries: how often a rollout is tried at most, where it fails on our side.
        pause: seconds before the second try; doubled for each one more.
        jitter: seconds over which the first rollouts begin, each at a random moment.
        drain: seconds that rollouts under way have to end when the batch is told to.
        config: what else describes the run; going on with it needs the same.
        progress: called on the event loop for each rollout, those that were finished before included.

    Raises:
        InvalidValue: a number makes no sense.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        setup: Setup,
        out: Path,
        *,
        image_of: ImageOf | None = None,
        images: ImagesOf | None = None,
        attempts: int = 1,
        budgets: Budgets | None = None,
        tries: int = 3,
        pause: float = 1.0,
        jitter: float = 0.0,
        drain: float = DRAIN,
        config: Config | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        for name, number in (("attempts", attempts), ("tries", tries)):
            if number < 1:
                raise InvalidValue(f"{name} is {number}", hint="give 1 or more")
        if (image_of is None) == (images is None):
            raise InvalidValue("a batch needs image_of or images", hint="give one of them: where images come from")
        self._setup, self._out, self._progress = setup, out, progress
        self._image_of, self._images = image_of, images
        self._building: Building | None = None
        self._budgets = budgets or Budgets()
        self._tries, self._pause, self._jitter, self._patience = tries, pause, jitter, drain
        self._config = {
            **(config or {}), "agent": setup.agent.name, "model": setup.model_name or None, "attempts": attempts,
            "workers": self._budgets.workers, "timeout": setup.timeout,
        }  # fmt: skip
        self._jobs = [Job(task, attempt) for task in tasks for attempt in range(attempts)]
        if twice := [key[0] for key, count in Counter(job.key for job in self._jobs).items() if count > 1]:
            raise InvalidValue(f"{twice[0]!r} is there twice", hint="attempts= says how often each task is done")
        self._summaries: dict[tuple[str, int], Summary] = {}
        self._resumed = 0
        self._answered = self._answered_before = False
        self._under_way: set[Draft] = set()
        self._draining = self._hurried = False
        self._fault: Exception | None = None
        self._scope: asyncio.Timeout | None = None
        self._began = time.monotonic()
        self._line = Line(4 * self._budgets.workers)
        self._room = asyncio.Semaphore(self._budgets.workers + 2 * self._budgets.gradings)
        self._warm: WarmPool[tuple[str, int]] = WarmPool(self._budgets.warm, self._budgets.starts)
        self._builders = Threads(self._budgets.builds, "image")
        self._graders = Threads(self._budgets.gradings, "grade")
        self._grading = Cancellation()
        self._writer = Threads(1, "write")

    # --- what others see ---------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """How many rollouts it has, those that were finished before included."""
        return len(self._jobs)

    @property
    def patience(self) -> float:
        """Seconds that rollouts under way have to end when the batch is told to."""
        return self._patience

    @property
    def stages(self) -> Mapping[str, int]:
        """How many rollouts are where: ``queued``, ``image``, ``sandbox``, ``agent``, ``grade``, ``ended``."""
        counts = Counter(job.stage for job in self._jobs)
        return {stage: counts[stage] for stage in STAGES}

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Those of the rollouts that have ended, task by task."""
        return tuple(self._summaries[job.key] for job in self._jobs if job.key in self._summaries)

    @property
    def seconds_left(self) -> float | None:
        """How long the rest will take, by how long it has taken; None while none has ended."""
        done = len(self._summaries) - self._resumed
        if not done:
            return None
        return (time.monotonic() - self._began) / done * (len(self._jobs) - len(self._summaries))

    def drain(self) -> None:
        """Begin no more rollouts; those under way have some time to end. Calling it again does nothing."""
        if not self._hurried:
            self._hurried = True
            self._begin_no_more()
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time() + self._patience)

    def _begin_no_more(self) -> None:
        self._draining = True
        self._line.end(clear=True)
        if self._building is not None:
            self._builders.submit(self._building.cancel)

    # --- the whole ---------------------------------------------------------------------------------------------------

    async def run(self) -> tuple[Summary, ...]:
        """Do what no earlier batch has finished. A cancellation ends it at once; finished rollouts are on disk.

        Returns:
            A summary of each rollout that has ended, task by task: of all, unless it was drained.

        Raises:
            RunError: the directory is in use, belongs to another run, or cannot be written.
            TrajectoryError: a trajectory in it cannot be read.
            DiskFull: the disk is full; what was finished is kept.
            BudgetExceeded: the model's budget is used up; what was under way without it was finished.
            ModelRefused: the model's server refuses what it is asked, from the first request on.
        """
        await self._open()
        try:
            await self._carry_out()
            await self._writer.run(export_overview, self._out, self._out)
        finally:
            await self._let_go()
        if self._fault is not None:
            raise self._fault
        return self.summaries

    async def _open(self) -> None:
        """Open the run's directory; where nobody waits for that any more, it is let go of again."""
        opening = self._writer.submit(RunDirectory.open, self._out, self._config)
        try:
            self._run = await asyncio.wrap_future(opening)
        except BaseException:  # a cancellation above all: the directory's lock must not outlive the attempt
            opening.add_done_callback(_let_go_of)
            self._writer.close()
            raise

    async def _carry_out(self) -> None:
        await self._take_over()
        todo = [job for job in self._jobs if job.key not in self._summaries]
        self._began = time.monotonic()
        self._scope = asyncio.timeout(self._patience if self._hurried else None)
        try:
            async with self._scope, asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._provide_images(todo))
                for _ in range(min(self._budgets.workers, len(todo))):
                    group.create_task(self._serve())
        except TimeoutError:
            if not self._scope.expired():
                raise
        except BaseExceptionGroup as errors:  # the first one ended the others
            raise _first(errors) from None

    async def _take_over(self) -> None:
        """Take over what earlier batches have finished."""
        known = await self._writer.run(lambda: {(one.instance_id, one.attempt): one for one in self._run.summaries()})
        if self._run.journal != "wal":
            said = f"{self._out}: this file system has no shared memory, so that SQLite uses a rollback journal"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        self._answered_before = any(one.turns for one in known.values())
        for job in self._jobs:
            one = known.get(job.key)
            if one is not None and one.finished:
                self._resumed += 1
                self._note(job, dataclasses.replace(one, resumed=True))

    async def _let_go(self) -> None:
        """Stop what was made ahead, what is built and what is graded; let what is being written be written."""

        def close() -> None:
            self._grading.cancel()
            if self._building is not None:
                self._building.cancel()
            self._graders.join(_ENDING)
            self._writer.join(_WRITING)
            self._run.close()

        try:
            await self._warm.close()
        finally:
            for threads in (self._builders, self._graders, self._writer):
                threads.close()
            await in_thread(close)

    def _end_by(self, error: Exception) -> None:
        """Let what is under way be finished, however long it takes, and then raise an error."""
        self._fault = self._fault or error
        self._begin_no_more()

    # --- images ------------------------------------------------------------------------------------------------------

    async def _provide_images(self, todo: list[Job]) -> None:
        """Have images made, each once and not too far ahead; the rollouts of each stand in line when it is there."""
        groups: dict[str, list[Job]] = {}
        for job in todo:
            groups.setdefault(job.task.instance_id, []).append(job)
        if self._images is not None:
            await self._provide_together(groups, self._images)
        elif self._image_of is not None:
            await self._provide_each(groups, self._image_of)
        self._line.end()

    async def _provide_together(self, groups: Mapping[str, list[Job]], images: ImagesOf) -> None:
        # on the loop: it only begins, and nothing can come in between that would leave it without an owner
        self._building = images([jobs[0].task for jobs in groups.values()], self._budgets.builds)
        if self._draining:
            self._builders.submit(self._building.cancel)
        async with asyncio.TaskGroup() as group:
            for name, jobs in groups.items():
                group.create_task(self._provide(jobs, asyncio.wrap_future(self._building.images[name])))

    async def _provide_each(self, groups: Mapping[str, list[Job]], image_of: ImageOf) -> None:
        slots = asyncio.Semaphore(self._budgets.builds)

        async def provide(jobs: list[Job]) -> None:
            try:
                await self._provide(jobs, self._builders.run(image_of, jobs[0].task))
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            for jobs in groups.values():
                await slots.acquire()
                if not await self._line.room():
                    break
                group.create_task(provide(jobs))

    async def _provide(self, jobs: list[Job], coming: Awaitable[Image]) -> None:
        began = time.monotonic()
        for job in jobs:
            job.stage = "image"
        try:
            image = await coming
        except CancelledError:  # the building was called off: these have not begun
            for job in jobs:
                job.stage = "queued"
        except MiniSandboxError as error:
            times = {"queued": began - self._began, "image": time.monotonic() - began}
            for job in jobs:
                one = unreached(job.task, self._setup, job.attempt, error, waited=times)
                self._note(job, await self._kept(one))
        except Exception as error:  # noqa: BLE001 - a mistake: what runs is finished, then it is raised
            self._end_by(error)
        else:
            for job in jobs:
                job.image, job.image_seconds, job.stage = image, time.monotonic() - began, "queued"
            self._line.put(jobs)
            self._make_ahead()

    # --- rollouts ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Do one rollout after another: one of the workers."""
        if self._jitter:
            await asyncio.sleep(random.uniform(0.0, self._jitter))  # noqa: S311 - it spreads the load
        while (job := await self._line.take()) is not None:
            self._make_ahead()
            await self._room.acquire()  # where grading is slower than agents are, they wait
            draft = await self._attempted(job)
            self._group.create_task(self._conclude(job, draft))

    def _make_ahead(self) -> None:
        """Make sandboxes for the rollouts that are next."""
        for job in self._line.next(self._budgets.warm):
            if self._draining or not self._warm.expect(job.key, lambda one=job: self._new_box(one)):  # type: ignore[misc] # this round's
                return

    async def _new_box(self, job: Job) -> AsyncSandbox:
        assert job.image is not None
        return await make_box(job.image, self._setup.limits)

    async def _attempted(self, job: Job) -> Draft:
        """Let the agent work, again where we fail; returns what came of the last try."""
        tries: tuple[Failure, ...] = ()
        times = {"queued": time.monotonic() - self._began, "image": job.image_seconds}
        assert job.image is not None

        async def take_box() -> AsyncSandbox:
            box = await self._warm.take(job.key, lambda: self._new_box(job))
            job.stage = "agent"
            return box

        while True:
            job.stage = "sandbox"
            draft = Draft(
                job.task, (job.image.name, job.image.key), self._setup, job.attempt, tries=tries, waited=times
            )
            self._under_way.add(draft)
            try:
                await work(draft, take_box)
            finally:
                self._under_way.discard(draft)
            self._look_at(draft)
            if draft.failure is None or not self._worth_another(draft):
                return draft
            await asyncio.sleep(self._pause * 2 ** len(tries) * random.uniform(0.5, 1.5))  # noqa: S311 - as above
            if self._draining:
                return draft
            tries = (*tries, draft.failure)

    def _look_at(self, draft: Draft) -> None:
        """End the batch where none of its rollouts can go on."""
        self._answered = self._answered or draft.answered or any(one.answered for one in self._under_way)
        error = draft.error
        if isinstance(error, BudgetExceeded):
            self._end_by(error)
        elif isinstance(error, ModelRefused) and not self._answered:  # noqa: SIM102 - as the comment says
            # where one request is refused, answers in an earlier part of the run say that others are not
            if error.every_request or not self._answered_before:
                self._end_by(error)

    def _worth_another(self, draft: Draft) -> bool:
        """Whether what failed may go well the next time."""
        assert draft.failure is not None
        if self._draining or len(draft.tries) + 1 >= self._tries or isinstance(draft.error, InvalidValue | NotFound):
            return False
        if draft.failure.phase in ("sandbox", "patch"):
            return True
        return isinstance(draft.error, HostError | SandboxGone | ModelUnavailable | BadAnswer)

    async def _conclude(self, job: Job, draft: Draft) -> None:
        """Grade a rollout whose agent has ended, and keep it."""
        job.stage = "grade"
        try:
            # what has nothing to grade does not wait for what has
            threads = self._graders if draft.failure is None else self._writer
            assert job.image is not None
            one = await threads.run(finish, draft, job.image, tries=self._tries, cancellation=self._grading)
            self._note(job, await self._kept(one))
        finally:
            self._room.release()

    async def _kept(self, trajectory: Trajectory) -> Summary:
        """Write a rollout; a cancellation does not keep it from being written."""
        return await asyncio.shield(asyncio.wrap_future(self._writer.submit(self._run.write, trajectory)))

    def _note(self, job: Job, summary: Summary) -> None:
        job.stage, job.image = "ended", None
        self._summaries[job.key] = summary
        if self._progress is not None:
            self._progress(Progress(len(self._summaries), len(self._jobs), summary, self.seconds_left))


def _let_go_of(opening: Future[RunDirectory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
