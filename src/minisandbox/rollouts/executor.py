"""Run rollouts on one node: build images, create sandboxes, run agents and grade submissions."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

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
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.database import pack
from minisandbox.rollouts.jobs import Job, Key, Outcome
from minisandbox.rollouts.rollout import finish, make_box, unreached, work
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.state import RolloutState
from minisandbox.runs import Threads
from minisandbox.sandbox import AsyncSandbox
from minisandbox.sandbox.cancellation import Cancellation, CancelledError
from minisandbox.sandbox.io_async import call_blocking
from minisandbox.tasks import Task
from minisandbox.trajectories import Failure

if TYPE_CHECKING:
    from minisandbox.images import Building, Image

_ENDING = 30.0


class JobOwner(Protocol):
    """The owner of jobs, which stores their outcomes and stops the run after a fatal error."""

    async def ended(self, job: Job, outcome: Outcome, /) -> None:
        """Store the outcome of a job that has ended."""

    def stop_with(self, error: Exception) -> None:
        """Start no more jobs, let running jobs finish, then raise the error."""


class Crew(Protocol):
    """A job scheduler for one or more nodes. On one event loop, use :meth:`run`, or :meth:`serve` and :meth:`put`."""

    async def run(self, todo: list[Job], owner: JobOwner) -> None:
        """Run jobs until all have ended, or until running jobs have ended after :meth:`drain`."""

    async def serve(self, owner: JobOwner) -> None:
        """Run the jobs given to :meth:`put`, until :meth:`drain`."""

    def put(self, jobs: list[Job]) -> None:
        """Add jobs. Their keys must differ from the keys of pending jobs."""

    def forget(self, job: Job) -> None:
        """Drop a job: do not start it, and discard its result."""

    def drain(self) -> None:
        """Start no more rollouts."""

    async def close(self) -> None:
        """Release all resources."""


class Executor:
    """Run rollouts on this node, as a :class:`Crew`. Use each executor once.

    Attributes:
        answered_before: whether the model responded to a request in an earlier part of a resumed run.

    Args:
        setup: the agent, its model, and limits.
        budgets: concurrency limits.
        image_of: returns a task's image; called in several threads, once per task.
        images: starts to build the images of many tasks together; replaces ``image_of``.
        tries: maximum tries of a rollout; infrastructure errors are retried.
        pause: seconds before the second try; doubled before each further try.
        jitter: seconds over which the starts of the first rollouts are spread at random.
        freed: called when an agent has stopped, so that another rollout may start.
    """

    def __init__(
        self,
        setup: Setup,
        budgets: Budgets,
        *,
        image_of: ImageOf | None = None,
        images: ImagesOf | None = None,
        tries: int = 3,
        pause: float = 1.0,
        jitter: float = 0.0,
        freed: Callable[[], object] = lambda: None,
    ) -> None:
        self._setup, self._budgets, self._image_of, self._images = setup, budgets, image_of, images
        self._tries, self._pause, self._jitter, self._freed = tries, pause, jitter, freed
        self._running: dict[Key, asyncio.Task[RolloutState]] = {}
        self._building: Building | None = None
        self.answered_before = False
        self._answered = False
        self._under_way: set[RolloutState] = set()
        self._draining = False
        self._queue = asyncio.Queue[Job | None]()  # jobs whose image is ready; None tells the workers to exit
        self._slots = asyncio.Semaphore(budgets.workers + 2 * budgets.gradings)
        self._starts = asyncio.Semaphore(budgets.starts)
        self._builders = Threads(budgets.builds, "image")
        self._graders = Threads(budgets.gradings, "grade")
        self._grading = Cancellation()
        self._packer = Threads(1, "pack")

    async def run(self, todo: list[Job], owner: JobOwner) -> None:
        """Build the images of the jobs, and run each job when its image is ready."""
        async with self._setup.serving(), asyncio.TaskGroup() as group:
            self._start_workers(group, owner, len(todo))
            await self._provide(todo)
            self._queue.put_nowait(None)

    async def serve(self, owner: JobOwner) -> None:
        """Run the jobs given to :meth:`put`, until :meth:`drain`."""
        async with self._setup.serving(), asyncio.TaskGroup() as group:
            self._start_workers(group, owner, self._budgets.workers)

    def put(self, jobs: list[Job]) -> None:
        """Add jobs. If their image is missing, build it first, once for all jobs of a task."""
        self._put_ready([job for job in jobs if job.image is not None])
        if missing := [job for job in jobs if job.image is None]:
            self._group.create_task(self._provide(missing))

    def forget(self, job: Job) -> None:
        """Drop a job: stop its agent and sandbox. If grading has begun, let it finish and discard its result."""
        job.dropped = True
        if (attempt := self._running.get(job.key)) is not None:
            attempt.cancel()

    def _start_workers(self, group: asyncio.TaskGroup, owner: JobOwner, maximum: int) -> None:
        self._group, self._owner = group, owner
        for _ in range(min(self._budgets.workers, maximum)):
            group.create_task(self._work())

    def _put_ready(self, jobs: list[Job]) -> None:
        if not self._draining:
            for job in jobs:
                self._queue.put_nowait(job)

    def drain(self) -> None:
        """Start no more rollouts."""
        self._draining = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)
        if self._building is not None:
            self._builders.submit(self._building.cancel)

    async def close(self) -> None:
        """Cancel builds and gradings."""

        def end() -> None:
            self._grading.cancel()
            if self._building is not None:
                self._building.cancel()
            self._graders.join(_ENDING)

        for threads in (self._builders, self._graders, self._packer):
            threads.close()
        await call_blocking(end)

    # --- images ------------------------------------------------------------------------------------------------------

    async def _provide(self, jobs: list[Job]) -> None:
        """Build the image of each task once, and queue the task's jobs when it is ready."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.task.instance_id, []).append(job)
        if self._images is not None:
            # images() returns at once; without an await, no cancellation can occur between call and assignment
            self._building = self._images([group[0].task for group in groups.values()], self._budgets.builds)
            if self._draining:
                self._builders.submit(self._building.cancel)
        async with asyncio.TaskGroup() as tasks:
            for group in groups.values():
                tasks.create_task(self._provide_image(group))

    async def _provide_image(self, jobs: list[Job]) -> None:
        task, building, began = jobs[0].task, self._building, time.monotonic()
        for job in jobs:
            job.stage = "image"
        try:
            image = await (
                self.image(task) if building is None else asyncio.wrap_future(building.images[task.instance_id])
            )
        except CancelledError:  # these jobs do not start
            for job in jobs:
                job.stage = "queued"
        except MiniSandboxError as error:
            for job in jobs:
                times = {"queued": began - job.since, "image": time.monotonic() - began}
                trajectory = unreached(job.task, self._setup, job.attempt, error, waited=times)
                await self._owner.ended(job, await self._packer.run(pack, trajectory))
        except Exception as error:  # noqa: BLE001 - a bug: let running jobs finish, then raise the error
            self._owner.stop_with(error)
        else:
            for job in jobs:
                job.image, job.image_seconds, job.stage = image, time.monotonic() - began, "queued"
            self._put_ready(jobs)

    async def image(self, task: Task) -> Image:
        """Return a task's image; build the image if necessary.

        Raises:
            CancelledError: the build had not started when the executor was drained.
        """

        def build() -> Image:
            if self._draining:
                raise CancelledError
            assert self._image_of is not None
            return self._image_of(task)

        return await self._builders.run(build)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Run queued jobs one after another, as one of several concurrent workers."""
        if self._jitter:
            await asyncio.sleep(random.uniform(0.0, self._jitter))  # noqa: S311 - spreads the load
        while (job := await self._queue.get()) is not None:
            if job.dropped:
                continue
            await self._slots.acquire()  # do not start an agent while grading is behind
            attempt = self._running[job.key] = asyncio.ensure_future(self._attempted(job))
            try:
                state = await attempt  # cancelling this worker cancels the attempt too
            except asyncio.CancelledError:
                if not job.dropped or ((task := asyncio.current_task()) is not None and task.cancelling()):
                    raise
                self._slots.release()
                continue
            finally:
                del self._running[job.key]
            self._group.create_task(self._conclude(job, state))
        self._queue.put_nowait(None)  # for the other workers

    async def _attempted(self, job: Job) -> RolloutState:
        """Run the agent, and retry after an infrastructure error; return the state after the last try."""
        tries: tuple[Failure, ...] = ()
        times = {"queued": time.monotonic() - job.since, "image": job.image_seconds}
        setup = self._setup if job.draw is None else job.draw.of(self._setup)
        image = job.image
        assert image is not None

        async def make() -> AsyncSandbox:
            async with self._starts:
                box = await make_box(image, job.task, setup)
            job.stage = "agent"
            return box

        while True:
            job.stage = "sandbox"
            state = RolloutState(job.task, (image.name, image.key), setup, job.attempt, tries=tries, waited=times)
            self._under_way.add(state)
            try:
                await work(state, make)
            finally:
                self._under_way.discard(state)
            self._stop_if_hopeless(state)
            if state.failure is None or not self._worth_another(state):
                return state
            await asyncio.sleep(self._pause * 2 ** len(tries) * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries
            if self._draining:
                return state
            tries = (*tries, state.failure)

    def _stop_if_hopeless(self, state: RolloutState) -> None:
        """Stop the batch if no further rollout can succeed: the budget is spent, or the server rejects all requests.

        If the server responded before the run was resumed, the rejection of a single request does not stop the batch.
        """
        self._answered = self._answered or state.answered or any(running.answered for running in self._under_way)
        error = state.error
        if isinstance(error, BudgetExceeded):
            self._owner.stop_with(error)
        elif isinstance(error, ModelRefused) and not self._answered:  # noqa: SIM102 - nested for readability
            if error.every_request or not self.answered_before:
                self._owner.stop_with(error)

    def _worth_another(self, state: RolloutState) -> bool:
        """Return whether to try the rollout again after a failure."""
        assert state.failure is not None
        if self._draining or len(state.tries) + 1 >= self._tries or isinstance(state.error, InvalidValue | NotFound):
            return False
        if state.failure.phase in ("sandbox", "patch"):
            return True
        return isinstance(state.error, HostError | SandboxGone | ModelUnavailable | BadAnswer)

    async def _conclude(self, job: Job, state: RolloutState) -> None:
        """Grade a rollout whose agent has ended, and pass the result to the owner."""
        job.stage = "grade"
        self._freed()
        image = job.image
        assert image is not None
        try:
            # a failed rollout has no submission to grade, so it does not wait for the grading threads
            threads = self._graders if state.failure is None else self._packer
            packed = await threads.run(
                lambda: pack(finish(state, image, tries=self._tries, cancellation=self._grading))
            )
            await self._owner.ended(job, packed)
        finally:
            self._slots.release()
