"""What a node of a cluster does: build images, and run rollouts and checks with its own store and model client.

The worker does not depend on Ray: an actor calls it on one event loop, and ends its process when the driver is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import MiniSandboxError, NotFound
from minisandbox.images import Image, build, load_image
from minisandbox.pool import Job as Check
from minisandbox.pool import Threads, run_job
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.executor import Executor
from minisandbox.rollouts.jobs import STAGES, Checked, Job, Key, Outcome
from minisandbox.rollouts.setup import Draw, Setup
from minisandbox.store import Store
from minisandbox.tasks import Task

_REPORT_EVERY = 2.0
"""Seconds after which a node reports even if nothing has changed."""
_GATHER = 0.05
"""Seconds in which changes are gathered for one report: fewer reports cost the driver less."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a node offers.

    Attributes:
        sandboxes: concurrent rollouts.
        builds: concurrent image builds.
    """

    sandboxes: int
    builds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options of a worker, sent to each node.

    Attributes:
        setup_of: creates the setup, given the node's address; this opens the model's client on the node.
        checks: whether the node runs checks instead of rollouts.
        starts: sandboxes created at once; derived from the node's CPUs if None.
        gradings: submissions graded, or tasks checked, at once; the number of the node's CPUs if None.
        tries: maximum tries of a rollout on a node; infrastructure errors are retried.
        pause: seconds before the second try.
        mirrors: a directory of git repositories, present on each node, that builds use.
    """

    setup_of: Callable[[str], Setup]
    checks: bool = False
    starts: int | None = None
    gradings: int | None = None
    tries: int = 3
    pause: float = 1.0
    mirrors: Path | None = None

    def budgets(self, resources: Resources) -> Budgets:
        """Return a node's concurrency limits. No sandbox is created ahead: a node gets no job before it has room."""
        limits = {"starts": self.starts, "gradings": self.gradings}
        return Budgets(
            workers=resources.sandboxes,
            builds=resources.builds,
            warm=0,
            **{name: limit for name, limit in limits.items() if limit is not None},
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """A job for a node; the fields are those of :class:`.Job`.

    Attributes:
        task: the id of the task.
        attempt: the index of the rollout among the task's rollouts.
        waited: seconds that the job waited at the driver.
        draw: sampling options for this rollout only.
        check: the check; None for a rollout.
        earlier: the fingerprint of an earlier result of the check.
    """

    task: str
    attempt: int
    waited: float
    draw: Draw | None = None
    check: Check[Task] | None = None
    earlier: str | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """The driver's message to a node.

    Attributes:
        tasks: tasks that the node does not know yet.
        builds: ids of the tasks whose images the node shall build.
        jobs: jobs to start, whose images the node has.
        drop: jobs whose results nobody waits for.
        left: unfinished jobs of the batch, on all nodes.
    """

    tasks: tuple[Task, ...] = ()
    builds: tuple[str, ...] = ()
    jobs: tuple[Assignment, ...] = ()
    drop: tuple[Key, ...] = ()
    left: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """A node's status.

    Attributes:
        stages: number of jobs by stage; checks are ``queued`` or in ``grade``.
        images: number of images in its store.
        left: unfinished jobs of the batch, on all nodes, by the driver's last message.
    """

    stages: Mapping[str, int] = field(default_factory=dict)
    images: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A node's answer to an order.

    Attributes:
        outcomes: the jobs that have ended since the last report.
        built: the images built since the last report, by task id, each with the error if the build failed.
        free: jobs that the node can start now.
        fault: an error because of which no rollout of the batch can succeed.
    """

    outcomes: tuple[tuple[Key, Outcome], ...] = ()
    built: Mapping[str, MiniSandboxError | None] = field(default_factory=dict)
    free: int = 0
    fault: MiniSandboxError | None = None


class Worker:
    """A node's part in a batch. Create and use it on one event loop.

    Args:
        name: the node's address.
        resources: the node's resources.
        terms: the worker's options.
        store: the node's store.
    """

    def __init__(self, name: str, resources: Resources, terms: Terms, store: Store) -> None:
        self._terms, self._store = terms, store
        budgets = terms.budgets(resources)
        self.capacity = budgets.gradings if terms.checks else resources.sandboxes
        self._changed = asyncio.Event()
        self._executor = Executor(
            terms.setup_of(name), budgets, image_of=self._build, tries=terms.tries, pause=terms.pause,
            freed=self._changed.set,
        )  # fmt: skip
        self._checkers = Threads(budgets.gradings, "check")
        self._tasks: dict[str, Task] = {}
        self._ready: set[str] = set()  # tasks whose image was built, or found in the store, for this batch
        self._jobs: dict[Key, Job] = {}
        self._outcomes: list[tuple[Key, Outcome]] = []
        self._built: dict[str, MiniSandboxError | None] = {}
        self._fault: Exception | None = None
        self._left = 0
        self._background: set[asyncio.Task[None]] = set()
        self._serving = asyncio.ensure_future(self._executor.serve(self))

    # --- calls of the driver -----------------------------------------------------------------------------------------

    def images(self) -> tuple[str, ...]:
        """Return the names of the images in the store."""
        return tuple(self._store.image_names())

    async def exchange(self, order: Order) -> Report:
        """Start the work of an order, and report as soon as something has changed, or after two seconds.

        Raises:
            Exception: a bug, which has ended the executor or a background task.
        """
        self._left = order.left
        self._tasks.update((task.instance_id, task) for task in order.tasks)
        for name in order.builds:
            self._spawn(self._provide(name))
        for assignment in order.jobs:
            self._start(assignment)
        for key in order.drop:
            if (job := self._jobs.pop(key, None)) is not None:
                self._executor.forget(job)
        if not self._changed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_EVERY):
                    await self._changed.wait()
        if self._outcomes or self._built:
            await asyncio.sleep(_GATHER)
        self._changed.clear()
        if self._serving.done():
            self._serving.result()  # raises its error: nothing else ends it
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
        return Status({stage: counts[stage] for stage in STAGES}, sum(1 for _ in self._store.image_names()), self._left)

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

    async def _provide(self, name: str) -> None:
        try:
            await self._executor.image(self._tasks[name])
        except MiniSandboxError as error:
            self._built[name] = error
        else:
            self._built[name] = None
        self._changed.set()

    def _start(self, assignment: Assignment) -> None:
        job = Job(
            self._tasks[assignment.task], assignment.attempt, time.monotonic() - assignment.waited,
            draw=assignment.draw, check=assignment.check, earlier=assignment.earlier,
        )  # fmt: skip
        self._jobs[job.key] = job
        if job.check is not None:
            self._spawn(self._check(job, job.check))
            return
        job.image = self._image(job.task)
        self._executor.put([job])

    async def _check(self, job: Job, check: Check[Task]) -> None:
        def run() -> Checked:
            job.stage = "grade"
            return Checked(run_job(check, lambda task: self._image(task) or self._build(task), job.earlier))

        self._end(job, await self._checkers.run(run))

    def _image(self, task: Task) -> Image | None:
        """Return a task's image; None if it is not built, or if another process has removed it from the store."""
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

    # --- calls of the executor ---------------------------------------------------------------------------------------

    async def ended(self, job: Job, outcome: Outcome) -> None:
        """Keep the record of a rollout for the next report, or repeat it once if its image was removed meanwhile."""
        failed = isinstance(outcome, Packed) and outcome.summary.failed_in not in ("", "image")
        if failed and not job.retried and self._image(job.task) is None:
            job.retried, job.image = True, None
            self._executor.put([job])
            return
        self._end(job, outcome)

    def stop_with(self, error: Exception) -> None:
        """Report to the driver that no rollout can succeed."""
        self._fault = error
        self._changed.set()
