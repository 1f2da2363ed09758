"""Build many images: run shared steps once and independent steps in parallel, within a CPU and memory budget."""

from __future__ import annotations

import heapq
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.images.builder import Maker, known_failure, note_failure, record_image
from minisandbox.images.image import Image
from minisandbox.images.plan import ImagePlan, Planner
from minisandbox.images.progress import Progress
from minisandbox.images.runner import BuildSession, BuildStep
from minisandbox.sandbox.cancellation import Cancellation, CancelledError
from minisandbox.spec import Buildable
from minisandbox.store import LayerRecord, Store
from minisandbox.values import GiB

STEP_MEMORY = 4 * GiB
"""The memory limit of one step in bytes, if the budget limits memory."""

_EXIT_TIMEOUT = 30.0
"""Seconds that running steps have to exit after a cancellation."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The resources of this machine that builds may use.

    Attributes:
        jobs: the maximum number of steps that run at once.
        memory: the memory limit of all steps together in bytes; None for no limit. Each step may use
            :data:`STEP_MEMORY`, or the whole limit if that is less, so fewer than ``jobs`` steps may run at once.
    """

    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memory: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.jobs < 1:
            raise InvalidValue(f"{self.jobs} jobs", hint="give 1 or more")

    @property
    def step_memory(self) -> int | None:
        """The memory limit of one step in bytes; None for no limit."""
        return None if self.memory is None else min(STEP_MEMORY, self.memory)

    @property
    def workers(self) -> int:
        """The number of steps that run at once."""
        if self.memory is None:
            return self.jobs
        return max(1, min(self.jobs, self.memory // min(STEP_MEMORY, self.memory)))


@dataclass(frozen=True, slots=True)
class Built:
    """The result of building many images.

    Attributes:
        images: the finished images by name, in the requested order.
        failures: the errors of the failed images, by name.
        seconds: the build time of new layers, by image; a shared layer counts for the first image that needs it.
    """

    images: Mapping[str, Image]
    failures: Mapping[str, MiniSandboxError]
    seconds: Mapping[str, float]


def build_all(
    recipes: Mapping[str, Callable[[], Buildable]],
    *,
    store: Store,
    budget: Budget | None = None,
    progress: Progress | None = None,
    on_remaining: Callable[[str], None] | None = None,
    on_image: Callable[[Image], None] | None = None,
    note: Callable[[str], None] | None = None,
    retry_failed: bool = True,
    mirrors: Path | None = None,
    cancellation: Cancellation | None = None,
) -> Built:
    """Build the images of many recipes; run steps that images share only once.

    A failed image does not affect the others. An exception that interrupts the call, for example KeyboardInterrupt,
    kills the running steps. Finished layers are kept, and incomplete layers are never published, so that another call
    resumes the build.

    Args:
        recipes: for each image name, a function that returns the recipe.
        store: the store for the layers.
        budget: the resources of this machine that builds may use; by default one job per CPU.
        progress: called from several threads when each step starts and ends.
        on_remaining: called from several threads with a description of the remaining pulls and steps; "" if nothing
            remains.
        on_image: called for each image as soon as it is complete, first for cached images.
        note: called with the size of the container images to pull, and with the reason for each wait for a registry.
        retry_failed: whether to retry steps that failed in an earlier build with the same key.
        mirrors: a directory of git repositories that are tried before the network.
        cancellation: cancels the build from another thread.

    Returns:
        The images and the failures.

    Raises:
        CancelledError: the build was cancelled.
        DiskFull: the container images do not fit into the store; nothing was pulled or built.
    """
    planner, note = Planner(store, mirrors), note or (lambda _: None)
    outcomes = _Outcomes(store, on_image or (lambda _: None))
    evaluated, budget = outcomes.evaluate(recipes), budget or Budget()
    planner.fetch(evaluated.values(), progress, on_remaining, note)
    plans = outcomes.plan(evaluated, planner)
    with BuildSession(store, budget.step_memory, cancellation or Cancellation()) as session:
        graph = _Graph(Maker(session, planner.base(), progress), plans, on_remaining, budget.workers, retry_failed)
        graph.run(outcomes.record)
    outcomes.failures |= {name: error.about(name) for name, error in graph.failures.items()}
    for name, plan in plans.items():
        if name not in outcomes.failures:
            outcomes.record(plan)
    images = {name: outcomes.images[name] for name in plans if name in outcomes.images}
    failures = {name: outcomes.failures[name] for name in recipes if name in outcomes.failures}
    return Built(images, failures, graph.seconds)


class _Outcomes:
    """The finished images, and the errors of the failed images.

    Args:
        store: the store of the images.
        on_image: called once for each finished image.
    """

    def __init__(self, store: Store, on_image: Callable[[Image], None]) -> None:
        self.images: dict[str, Image] = {}
        self.failures: dict[str, MiniSandboxError] = {}
        self._store, self._on_image = store, on_image

    def evaluate(self, recipes: Mapping[str, Callable[[], Buildable]]) -> dict[str, Buildable]:
        """Call the functions that return the recipes; record an error as the failure of its image."""
        evaluated: dict[str, Buildable] = {}
        for name, recipe in recipes.items():
            try:
                evaluated[name] = recipe()
            except MiniSandboxError as error:
                self.failures[name] = copy(error).about(name)  # copy, as images may share the error object
        return evaluated

    def plan(self, recipes: Mapping[str, Buildable], planner: Planner) -> dict[str, ImagePlan]:
        """Plan images; record an image at once if all of its layers exist."""
        plans: dict[str, ImagePlan] = {}
        for name, recipe in recipes.items():
            try:
                plans[name] = plan = planner.plan(name, recipe)
            except MiniSandboxError as error:
                self.failures[name] = copy(error).about(name)  # copy, as images may share the error object
            else:
                if all(map(self._store.has_layer, {*plan.layers, *(step.key for step in plan.all_steps())})):
                    self.record(plan)
        return plans

    def record(self, plan: ImagePlan) -> None:
        """Record an image whose layers all exist, unless it is recorded already."""
        if plan.name in self.images or plan.name in self.failures:
            return
        try:
            self.images[plan.name] = record_image(plan, self._store)
        except MiniSandboxError as error:
            self.failures[plan.name] = error.about(plan.name)
        else:
            self._on_image(self.images[plan.name])


@dataclass(slots=True)
class _Node:
    """A missing layer in the graph of layers to build.

    Attributes:
        plan: the first plan that needs the layer.
        step: the step that builds the layer.
        names: the names of all images that need the layer.
        pending: the keys of unfinished layers that the step waits for.
        dependents: the keys of the layers that wait for this layer.
    """

    plan: ImagePlan
    step: BuildStep
    names: list[str]
    pending: set[str]
    dependents: list[str] = field(default_factory=list)


class _Graph:
    """The graph of layers to build. Each step runs in its own thread; the calling thread schedules the steps."""

    def __init__(
        self,
        maker: Maker,
        plans: Mapping[str, ImagePlan],
        on_remaining: Callable[[str], None] | None,
        workers: int,
        retry_failed: bool,
    ) -> None:
        self.failures: dict[str, MiniSandboxError] = {}
        self.seconds: dict[str, float] = dict.fromkeys(plans, 0.0)
        self._maker, self._plans, self._workers = maker, plans, workers
        self._store = maker.session.store
        self._missing: Counter[str] = Counter()  # number of missing layers, by image
        self._on_remaining = on_remaining or (lambda _: None)
        self._earlier_failures = {} if retry_failed else {failure.key: failure for failure in self._store.failures()}
        self._outcomes: queue.SimpleQueue[tuple[str, LayerRecord | BaseException]] = queue.SimpleQueue()
        self._nodes: dict[str, _Node] = {}
        # Keys of the missing layers by image, and numbers of images that still need a layer by key.
        self._needs: dict[str, list[str]] = {}
        self._demand: Counter[str] = Counter()
        for plan in plans.values():
            self._add(plan)
        nodes = enumerate(self._nodes.items())
        self._ready = [(-len(node.names), index, key) for index, (key, node) in nodes if not node.pending]
        heapq.heapify(self._ready)
        self._open = set(self._nodes)
        if plans:  # every step needs the base layer
            self._maker.make_base(next(iter(plans.values())))
        self._remaining = set(self._nodes)

    def _add(self, plan: ImagePlan) -> None:
        for step in plan.all_steps():
            if step.key in self._nodes:
                self._nodes[step.key].names.append(plan.name)
            elif not self._store.has_layer(step.key):
                pending = {key for key in (*step.below, *step.needs) if key in self._nodes}
                self._nodes[step.key] = _Node(plan, step, [plan.name], pending)
                for key in pending:
                    self._nodes[key].dependents.append(step.key)
            else:
                continue
            self._missing[plan.name] += 1
            self._demand[step.key] += 1
            self._needs.setdefault(plan.name, []).append(step.key)

    def run(self, on_image: Callable[[ImagePlan], None]) -> None:
        """Build all layers, except those above a failed step.

        Args:
            on_image: called for each image as soon as all of its layers exist.

        Raises:
            BaseException: the wait was interrupted, or a thread raised an error other than the failure of a step.
        """
        running, cancellation = set[str](), self._maker.session.cancellation
        try:
            self._report()
            while self._open or running:
                while len(running) < self._workers and (key := self._next()) is not None:
                    running.add(key)
                    threading.Thread(target=self._make, name="build", args=(key,), daemon=True).start()
                with suppress(queue.Empty):
                    key, outcome = self._outcomes.get(timeout=1.0)  # wake up regularly to check for a cancellation
                    running.discard(key)
                    for plan in self._end(key, outcome):
                        on_image(plan)
                    self._report()
                cancellation.check()
        except BaseException:  # also on Ctrl-C, kill the running steps first
            cancellation.cancel()
            with suppress(queue.Empty):
                while running:
                    running.discard(self._outcomes.get(timeout=_EXIT_TIMEOUT)[0])
            raise

    def _next(self) -> str | None:
        """Return the key of the ready layer that most images need; None if no layer is ready."""
        while self._ready:
            if (key := heapq.heappop(self._ready)[2]) in self._open:
                self._open.discard(key)
                return key
        return None

    def _make(self, key: str) -> None:
        """Build a layer and put the result into the queue. Runs in the step's own thread."""
        node = self._nodes[key]
        try:
            if (failure := self._earlier_failures.get(key)) is not None:
                raise known_failure(replace(failure, image=node.plan.name), self._store)
            self._outcomes.put((key, self._maker.make(node.plan, node.step)))
        except BaseException as error:  # noqa: BLE001 - the calling thread raises it
            self._outcomes.put((key, error))

    def _end(self, key: str, outcome: LayerRecord | BaseException) -> list[ImagePlan]:
        """Handle the result of a step; return the plans of images that are now complete."""
        self._remaining.discard(key)
        if isinstance(outcome, MiniSandboxError):
            self._fail(key, outcome)
            return []
        if isinstance(outcome, BaseException):
            raise outcome
        names = self._nodes[key].names
        self.seconds[self._nodes[key].plan.name] += outcome.seconds
        for dependent in self._nodes[key].dependents:
            node = self._nodes[dependent]
            node.pending.discard(key)
            if not node.pending and dependent in self._open:
                heapq.heappush(self._ready, (-len(node.names), len(self._open), dependent))
        self._missing.subtract(names)
        return [self._plans[name] for name in names if not self._missing[name]]

    def _fail(self, key: str, error: MiniSandboxError) -> None:
        node = self._nodes[key]
        for name in node.names:
            image_error = copy(error)  # replace the name of the image for which the step ran
            image_error.what = image_error.what.replace(f"image {node.plan.name!r}", f"image {name!r}")
            if key not in self._earlier_failures:
                note_failure(self._store, self._plans[name], node.step, image_error)
            if name not in self.failures:
                self.failures[name] = image_error
                self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Drop the layers that only this failed image needs."""
        for key in self._needs[name]:
            self._demand[key] -= 1
            if not self._demand[key] and key in self._open:
                self._open.discard(key)
                self._remaining.discard(key)

    def _report(self) -> None:
        total, remaining = len(self._nodes), len(self._remaining)
        self._on_remaining(f"step {total - remaining + 1} of {total}" if remaining else "")


class Building:
    """A :func:`build_all` call in a daemon thread, which starts at construction.

    The arguments are those of :func:`build_all`, and ``backend``, the backend of the images' sandboxes.

    Attributes:
        images: futures of the images, by name. A future gets its image as soon as the image is complete. If the image
            fails, the future gets the error after the whole build has ended, or a :class:`.CancelledError` if the
            build was cancelled.
    """

    def __init__(
        self,
        recipes: Mapping[str, Callable[[], Buildable]],
        *,
        store: Store,
        budget: Budget | None = None,
        progress: Progress | None = None,
        on_remaining: Callable[[str], None] | None = None,
        mirrors: Path | None = None,
        backend: str = "",
    ) -> None:
        self.images: dict[str, Future[Image]] = {name: Future() for name in recipes}
        for future in self.images.values():
            future.set_running_or_notify_cancel()  # forbid Future.cancel(), because several callers share a future
        self._cancellation = Cancellation()

        def make() -> Built:
            return build_all(
                recipes, store=store, budget=budget, progress=progress, on_remaining=on_remaining,
                on_image=lambda image: self.images[image.name].set_result(replace(image, backend=backend)),
                mirrors=mirrors,
                cancellation=self._cancellation,
            )  # fmt: skip

        self._thread = threading.Thread(target=self._work, args=(make,), name="building", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Cancel the build and wait until running steps have exited. Finished layers are kept. Idempotent."""
        self._cancellation.cancel()
        self._thread.join(_EXIT_TIMEOUT)

    def _work(self, make: Callable[[], Built]) -> None:
        try:
            failures: Mapping[str, BaseException] = make().failures
        except BaseException as error:  # noqa: BLE001 - the futures raise it
            failures = dict.fromkeys(self.images, error)
        for name, future in self.images.items():
            if not future.done():
                future.set_exception(failures.get(name) or CancelledError())
