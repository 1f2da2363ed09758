"""Batches: many rollouts at once, resumable, and interruptible without losing what is finished."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.pool import Threads
from minisandbox.rollouts.budgets import Budgets, Progress
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.executor import Crew, Executor
from minisandbox.rollouts.export import export_overview
from minisandbox.rollouts.line import STAGES, Job
from minisandbox.rollouts.rundir import Config, RunDirectory
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.summary import Summary
from minisandbox.sandbox.aio_drive import in_thread
from minisandbox.tasks import Task

DRAIN = 60.0
"""Seconds that rollouts under way have to end when a batch is told to."""
_WRITING = 60.0


class Batch:
    """Rollouts over tasks, many at once, each kept in a run directory as it ends. Used once, on one event loop.

    What is finished there already is skipped; what failed on our side is done again.

    Args:
        tasks: the tasks, in the order in which they are begun; those whose image is there go first.
        setup: who works, with what model, within which bounds.
        out: the run directory.
        image_of: returns a task's image; called in several threads, once for each task. Not used with a crew.
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
        crew: what does the rollouts; this process if None.

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
        crew: Crew | None = None,
    ) -> None:
        for name, number in (("attempts", attempts), ("tries", tries)):
            if number < 1:
                raise InvalidValue(f"{name} is {number}", hint="give 1 or more")
        self._out, self._patience, self._progress = out, drain, progress
        self._budgets = budgets or Budgets()
        self._config = {
            **(config or {}), "agent": setup.agent.name, "model": setup.model_name or None, "attempts": attempts,
            "workers": self._budgets.workers, "timeout": setup.timeout,
        }  # fmt: skip
        self._jobs = [Job(task, attempt) for task in tasks for attempt in range(attempts)]
        if twice := [key[0] for key, count in Counter(job.key for job in self._jobs).items() if count > 1]:
            raise InvalidValue(f"{twice[0]!r} is there twice", hint="attempts= says how often each task is done")
        self._summaries: dict[tuple[str, int], Summary] = {}
        self._resumed = 0
        self._draining = self._hurried = False
        self._fault: Exception | None = None
        self._scope: asyncio.Timeout | None = None
        self._began = time.monotonic()
        if crew is None:
            if (image_of is None) == (images is None):
                raise InvalidValue("a batch needs image_of or images", hint="give one of them: where images come from")
            crew = Executor(
                setup, self._budgets, image_of=image_of, images=images, tries=tries, pause=pause, jitter=jitter
            )
        self._crew = crew
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
        if not self._draining:
            self._draining = True
            self._crew.drain()

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
        for job in todo:
            job.since = self._began
        self._scope = asyncio.timeout(self._patience if self._hurried else None)
        try:
            async with self._scope:
                await self._crew.run(todo, self)
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
        if isinstance(self._crew, Executor):
            self._crew.answered_before = any(one.turns for one in known.values())
        for job in self._jobs:
            one = known.get(job.key)
            if one is not None and one.finished:
                self._resumed += 1
                self._note(job, dataclasses.replace(one, resumed=True))

    async def _let_go(self) -> None:
        """Stop what goes on; let what is being written be written."""

        def close() -> None:
            self._writer.join(_WRITING)
            self._run.close()

        try:
            await self._crew.close()
        finally:
            self._writer.close()
            await in_thread(close)

    def end_by(self, error: Exception) -> None:
        """Let what is under way be finished, however long it takes, and then raise an error."""
        self._fault = self._fault or error
        self._begin_no_more()

    # --- what rollouts become ----------------------------------------------------------------------------------------

    async def ended(self, job: Job, packed: Packed) -> None:
        """Keep a rollout that has ended; a cancellation does not keep it from being written."""
        keeping = self._writer.submit(self._run.keep, packed)
        try:
            kept = await asyncio.shield(asyncio.wrap_future(keeping))
        except asyncio.CancelledError:
            keeping.add_done_callback(self._kept_late)
            raise
        self._note(job, kept)

    def _kept_late(self, keeping: Future[Summary]) -> None:
        """End the batch with an error in writing whose caller was cancelled; called in the writer's thread."""
        error = None if keeping.cancelled() else keeping.exception()
        if isinstance(error, Exception):
            self._fault = self._fault or error

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
