"""Run many rollouts concurrently; an interrupted batch resumes without losing finished rollouts."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.grade.options import recorded_policy
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.executor import Crew, Executor
from minisandbox.rollouts.export import export_overview
from minisandbox.rollouts.jobs import STAGES, Job, Outcome
from minisandbox.rollouts.rundir import RunDirectory
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.summary import Summary
from minisandbox.runs import Config, Progress, Threads
from minisandbox.sandbox.io_async import call_blocking
from minisandbox.tasks import Task

DRAIN = 60.0
"""Seconds that running rollouts have to finish after a batch is drained."""
_WRITING = 60.0


class Batch:
    """Run many rollouts concurrently, and store each rollout in a run directory when it ends.

    A batch skips rollouts that an earlier batch finished in the directory, and repeats rollouts that ended with an
    infrastructure error. Use each batch only once, on one event loop.

    Args:
        tasks: the tasks, in the order in which they start. A task whose image is ready may start before earlier tasks.
        setup: the agent, its model, and limits.
        out: the run directory.
        image_of: returns a task's image; called in several threads, once per task. Not used with a crew.
        images: starts to build the images of many tasks together, ``budgets.builds`` steps at a time; replaces
            ``image_of``. Shared layers are built once.
        attempts: the number of rollouts per task.
        budgets: concurrency limits.
        tries: maximum tries of a rollout; infrastructure errors are retried.
        pause: seconds before the second try; doubled before each further try.
        jitter: seconds over which the starts of the first rollouts are spread at random.
        drain: seconds that running rollouts have to finish after the batch is drained.
        config: further properties of the run, which must be equal on resume.
        progress: called on the event loop after each rollout, and once for each rollout that finished earlier.
        crew: runs the rollouts; None runs them in this process.

    Raises:
        InvalidValue: a number is out of range, a task is listed twice, or the source of images is missing or ambiguous.
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
        progress: Callable[[Progress[Summary]], None] | None = None,
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
            **recorded_policy(setup.confirm),
        }  # fmt: skip
        self._jobs = [Job(task, attempt) for task in tasks for attempt in range(attempts)]
        self._config["rollouts"] = len(self._jobs)
        if repeated := [key[0] for key, count in Counter(job.key for job in self._jobs).items() if count > 1]:
            raise InvalidValue(f"the task {repeated[0]!r} is listed twice", hint="set attempts= to repeat each task")
        self._summaries: dict[tuple[str, int], Summary] = {}
        self._resumed = 0
        self._draining = self._hurried = False
        self._fault: Exception | None = None
        self._scope: asyncio.Timeout | None = None
        self._began = time.monotonic()
        if crew is None:
            if (image_of is None) == (images is None):
                raise InvalidValue("give a batch either image_of or images", hint="they say where images come from")
            crew = Executor(
                setup, self._budgets, image_of=image_of, images=images, tries=tries, pause=pause, jitter=jitter
            )
        self._crew = crew
        self._writer = Threads(1, "write")

    # --- status ------------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """The number of rollouts, including rollouts that finished earlier."""
        return len(self._jobs)

    @property
    def patience(self) -> float:
        """Seconds that running rollouts have to finish after the batch is drained."""
        return self._patience

    @property
    def stages(self) -> Mapping[str, int]:
        """The number of rollouts by stage: ``queued``, ``image``, ``sandbox``, ``agent``, ``grade``, ``ended``."""
        counts = Counter(job.stage for job in self._jobs)
        return {stage: counts[stage] for stage in STAGES}

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """The summaries of the rollouts that have ended, task by task."""
        return tuple(self._summaries[job.key] for job in self._jobs if job.key in self._summaries)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the batch ends; None until the first rollout of this batch has ended."""
        done = len(self._summaries) - self._resumed
        if not done:
            return None
        return (time.monotonic() - self._began) / done * (len(self._jobs) - len(self._summaries))

    def drain(self) -> None:
        """Start no more rollouts; running rollouts may finish within :attr:`patience` seconds. Idempotent."""
        if not self._hurried:
            self._hurried = True
            self._begin_no_more()
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time() + self._patience)

    def _begin_no_more(self) -> None:
        if not self._draining:
            self._draining = True
            self._crew.drain()

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> tuple[Summary, ...]:
        """Run the rollouts that no earlier batch finished.

        Cancellation stops the batch immediately; finished rollouts are already on disk.

        Returns:
            A summary of each rollout that has ended, task by task. Only a drained batch omits rollouts.

        Raises:
            RunError: the directory is in use, belongs to another run, or cannot be written.
            TrajectoryError: a trajectory in the directory cannot be read.
            DiskFull: the disk is full; finished rollouts are kept.
            BudgetExceeded: the model's budget is spent; rollouts that no longer needed the model have finished.
            ModelRefused: the model's server has rejected every request.
        """
        self._run = RunDirectory.open(self._out, self._config)
        try:
            await self._carry_out()
            await self._writer.run(export_overview, self._out, self._out)
        finally:
            await self._release()
        if self._fault is not None:
            raise self._fault
        return self.summaries

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
        except BaseExceptionGroup as errors:  # the first error cancelled the other tasks
            raise _first_error(errors) from None

    async def _take_over(self) -> None:
        """Load the summaries of earlier batches, and mark their finished rollouts as ended."""
        summaries = await self._writer.run(
            lambda: {(summary.instance_id, summary.attempt): summary for summary in self._run.summaries()}
        )
        if isinstance(self._crew, Executor):
            self._crew.answered_before = any(summary.turns for summary in summaries.values())
        for job in self._jobs:
            summary = summaries.get(job.key)
            if summary is not None and summary.finished:
                self._resumed += 1
                self._note(job, dataclasses.replace(summary, resumed=True))

    async def _release(self) -> None:
        """Stop the crew, finish pending writes, and close the directory."""

        def close() -> None:
            self._writer.join(_WRITING)
            self._run.close()

        try:
            await self._crew.close()
        finally:
            self._writer.close()
            await call_blocking(close)

    def stop_with(self, error: Exception) -> None:
        """Start no more rollouts, wait for running rollouts without a time limit, then raise the error."""
        self._fault = self._fault or error
        self._begin_no_more()

    # --- results -----------------------------------------------------------------------------------------------------

    async def ended(self, job: Job, outcome: Outcome) -> None:
        """Store a rollout that has ended, even if the caller is cancelled."""
        assert isinstance(outcome, Packed)
        write = self._writer.submit(self._run.keep, outcome)
        try:
            summary = await asyncio.shield(asyncio.wrap_future(write))
        except asyncio.CancelledError:
            write.add_done_callback(self._kept_late)
            raise
        self._note(job, summary)

    def _kept_late(self, write: Future[Summary]) -> None:
        """Record the error of a write whose caller was cancelled; called in the writer's thread."""
        error = None if write.cancelled() else write.exception()
        if isinstance(error, Exception):
            self._fault = self._fault or error

    def _note(self, job: Job, summary: Summary) -> None:
        job.stage, job.image = "ended", None
        self._summaries[job.key] = summary
        if self._progress is not None:
            self._progress(Progress(len(self._summaries), len(self._jobs), summary, self.seconds_left, summary.resumed))


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error
