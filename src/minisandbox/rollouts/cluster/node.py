"""Run a batch's jobs on a cluster node: build images, run rollouts and checks, with the node's store and model client.

The worker does not depend on Ray. A Ray actor calls the worker on one event loop, and exits when the driver is gone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import MiniSandboxError, NotFound
from minisandbox.images import Image, build, load_image
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.executor import Executor
from minisandbox.rollouts.jobs import STAGES, Job, Key, Outcome
from minisandbox.rollouts.setup import Setup
from minisandbox.runs import Job as Check
from minisandbox.runs import Result, Threads, run_job
from minisandbox.store import Store
from minisandbox.tasks import Task

_REPORT_EVERY = 2.0
"""Seconds after which a node reports even if nothing has changed."""
_GATHER = 0.1
"""Seconds for which a node collects changes for one report, because fewer reports cost the driver less."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a node offers.

    Attributes:
        sandboxes: maximum concurrent rollouts.
        builds: maximum concurrent image builds.
    """

    sandboxes: int
    builds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options of a worker, sent to each node.

    Attributes:
        setup_of: called on the node with the node's address; creates the setup, and opens the model's client.
        checks: whether the node runs checks instead of rollouts.
        limits: fields of :class:`.Budgets` that differ from their defaults, which depend on a node's CPUs.
        tries: maximum tries of a rollout on a node; infrastructure errors are retried.
        pause: seconds before the second try.
        mirrors: a directory of git repositories, present on each node, that builds use.
    """

    setup_of: Callable[[str], Setup]
    checks: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    tries: int = 3
    pause: float = 1.0
    mirrors: Path | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """The driver's message to a node.

    Attributes:
        builds: tasks whose images the node must build.
        jobs: jobs to start. The node has their images.
        drop: keys of cancelled jobs, which the node must drop.
        remaining: unfinished jobs of the batch, on all nodes.
    """

    builds: tuple[Task, ...] = ()
    jobs: tuple[Job, ...] = ()
    drop: tuple[Key, ...] = ()
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of a node's jobs and images.

    Attributes:
        stages: number of jobs by stage; checks are ``queued`` or in ``grade``.
        images: number of images in the node's store.
        remaining: unfinished jobs of the batch, on all nodes, according to the driver's last order.
    """

    stages: Mapping[str, int] = field(default_factory=dict)
    images: int = 0
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A node's response to an order.

    Attributes:
        outcomes: the jobs that have ended since the last report.
        built: the images built since the last report, by task id, each with the error if the build failed.
        free: the number of jobs that the node can start now.
        fault: an error that prevents all further rollouts of the batch from succeeding, or None.
    """

    outcomes: tuple[tuple[Key, Outcome], ...] = ()
    built: Mapping[str, MiniSandboxError | None] = field(default_factory=dict)
    free: int = 0
    fault: MiniSandboxError | None = None


class Worker:
    """Run the jobs of a batch on one node. Create and use the worker on one event loop.

    Args:
        name: the node's address.
        resources: the node's resources.
        terms: the worker's options.
        store: the node's store.
    """

    def __init__(self, name: str, resources: Resources, terms: Terms, store: Store) -> None:
        self._terms, self._store = terms, store
        budgets = Budgets(workers=resources.sandboxes, builds=resources.builds, **terms.limits)
        self.capacity = budgets.gradings if terms.checks else resources.sandboxes
        self._changed = asyncio.Event()
        self._executor = Executor(
            terms.setup_of(name), budgets, image_of=self._build, tries=terms.tries, pause=terms.pause,
            freed=self._changed.set,
        )  # fmt: skip
        self._checkers = Threads(budgets.gradings, "check")
        self._ready: set[str] = set()  # tasks whose image this batch built or found in the store
        self._jobs: dict[Key, Job] = {}
        self._outcomes: list[tuple[Key, Outcome]] = []
        self._built: dict[str, MiniSandboxError | None] = {}
        self._fault: Exception | None = None
        self._remaining = 0
        self._background: set[asyncio.Task[None]] = set()
        self._serving = asyncio.ensure_future(self._executor.serve(self))

    # --- called by the driver ----------------------------------------------------------------------------------------

    def images(self) -> tuple[str, ...]:
        """Return the names of the images in the store."""
        return tuple(self._store.image_names())

    async def exchange(self, order: Order) -> Report:
        """Start the jobs and builds of an order, and return a report on the next change, or after two seconds.

        Raises:
            Exception: a bug has stopped the executor or a background task.
        """
        self._remaining = order.remaining
        for key in order.drop:
            if (dropped := self._jobs.pop(key, None)) is not None:
                self._executor.forget(dropped)
        for task in order.builds:
            self._spawn(self._provide(task))
        for job in order.jobs:
            self._start(job)
        with suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_EVERY):
                await self._changed.wait()
                await asyncio.sleep(_GATHER)
        self._changed.clear()
        if self._serving.done():
            self._serving.result()  # the executor stops only by an error, which this raises
        outcomes, self._outcomes = self._outcomes, []
        built, self._built = self._built, {}
        if self._fault is not None and not isinstance(self._fault, MiniSandboxError):
            raise self._fault
        return Report(tuple(outcomes), built, self._free(), self._fault)

    async def wake(self) -> None:
        """Make a pending :meth:`exchange` report at once, because the driver has new jobs."""
        self._changed.set()

    def status(self) -> Status:
        """Return the node's status."""
        counts = Counter(job.stage for job in self._jobs.values())
        return Status(
            {stage: counts[stage] for stage in STAGES}, sum(1 for _ in self._store.image_names()), self._remaining
        )

    def _free(self) -> int:
        rollouts = [job for job in self._jobs.values() if job.check is not None or job.stage != "grade"]
        return max(0, self.capacity - len(rollouts))

    # --- work --------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._note_background)

    def _note_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.stop_with(error)

    async def _provide(self, task: Task) -> None:
        error = None
        try:
            await self._executor.image(task)
        except MiniSandboxError as problem:
            error = problem
        self._built[task.instance_id] = error
        self._changed.set()

    def _start(self, job: Job) -> None:
        self._jobs[job.key] = job
        if job.check is not None:
            self._spawn(self._check(job, job.check))
            return
        job.image = self._image(job.task)
        self._executor.put([job])

    async def _check(self, job: Job, check: Check[Task]) -> None:
        def run() -> Result | None:
            job.stage = "grade"
            return run_job(check, lambda task: self._image(task) or self._build(task), job.earlier)

        self._end(job, await self._checkers.run(run))

    def _image(self, task: Task) -> Image | None:
        """Return a task's image, or None if it is not built or another process has removed it from the store."""
        if task.instance_id in self._ready:
            with suppress(NotFound):
                return load_image(self._store, task.instance_id)
        return None

    def _build(self, task: Task) -> Image:
        try:
            image = build(task.recipe(), store=self._store, name=task.instance_id, mirrors=self._terms.mirrors)
        except MiniSandboxError as error:
            raise error.about(task.instance_id) from None
        self._ready.add(task.instance_id)
        return image

    def _end(self, job: Job, outcome: Outcome) -> None:
        if self._jobs.pop(job.key, None) is not None:
            self._outcomes.append((job.key, outcome))
            self._changed.set()

    # --- called by the executor --------------------------------------------------------------------------------------

    async def ended(self, job: Job, outcome: Outcome) -> None:
        """Keep a rollout's record for the next report, or repeat the rollout once if its image was removed."""
        failed = isinstance(outcome, Packed) and outcome.summary.failed_in not in ("", "image")
        if failed and not job.retried and self._image(job.task) is None:
            job.retried, job.image = True, None
            self._executor.put([job])
            return
        self._end(job, outcome)

    def stop_with(self, error: Exception) -> None:
        """Report the error to the driver, because no further rollout can succeed."""
        self._fault = error
        self._changed.set()
