"""Images for tasks, made while the user is told: for every command that needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.cli.output import Progress, human_seconds, human_size
from minisandbox.errors import MiniSandboxError
from minisandbox.images import Budget, BuildEvent, Building, Estimate, Image, Recipe, StepState, build, build_all
from minisandbox.store import Store
from minisandbox.store.collect import remove_images
from minisandbox.tasks import Task


@dataclass(slots=True)
class Builder:
    """Builds images of tasks, each at most once, and adds up what that took.

    Attributes:
        store: where the images go.
        progress: where it is told.
        mirrors: a directory of git repositories that are looked in before the network is.
        seconds: by image, the seconds that layers made on this occasion took; 0.0 where all was there.
        failures: by image, what kept it from being built.
    """

    store: Store
    progress: Progress
    mirrors: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, MiniSandboxError] = field(default_factory=dict)
    _images: dict[str, Image] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: str = ""

    @property
    def left(self) -> str:
        """What is said of how much is left to build; empty for nothing, or where that is not known."""
        return self._left

    def image_of(self, task: Task) -> Image:
        """Return a task's image, built if it is not there; several threads may ask at once.

        Raises:
            MiniSandboxError: it could not be built, now or when it was asked for before.
        """
        name = task.instance_id
        with self._own_lock(name):
            if name in self.failures:
                raise self.failures[name]
            if name not in self._images:
                try:
                    self.seconds.setdefault(name, 0.0)
                    recipe = task.recipe()
                    self._images[name] = build(
                        recipe, store=self.store, name=name, progress=self._tell, mirrors=self.mirrors
                    )
                except MiniSandboxError as error:
                    self.progress.note(f"{name}: not built: {error.what}")
                    self.failures[name] = error.about(name)
                    raise
            return self._images[name]

    def build_all(self, tasks: Iterable[Task], workers: int) -> dict[str, Image]:
        """Build the images of all tasks that can be built; the others are in ``failures``.

        Args:
            tasks: the tasks.
            workers: steps at once.

        Returns:
            The images by task id.
        """
        return self.build_recipes({task.instance_id: task.recipe for task in tasks}, Budget(jobs=workers))

    def begin(self, tasks: Iterable[Task], workers: int) -> Building:
        """Begin to build the images of all tasks, in the background.

        Args:
            tasks: the tasks.
            workers: steps at once.
        """
        building = Building(
            {task.instance_id: task.recipe for task in tasks},
            store=self.store,
            budget=Budget(jobs=workers),
            progress=self._tell,
            on_estimate=self._tell_estimate,
            mirrors=self.mirrors,
        )
        for name, future in building.images.items():
            future.add_done_callback(lambda done, name=name: self._tell_failure(name, done))  # type: ignore[misc] # this round's
        return building

    def build_recipes(
        self, recipes: Mapping[str, Callable[[], Recipe]], budget: Budget, *, retry_failed: bool = True
    ) -> dict[str, Image]:
        """Build the images of all recipes that can be built; the others are in ``failures``.

        Args:
            recipes: by the image's name.
            budget: what it may take of this machine.
            retry_failed: whether steps that failed before are tried again.

        Returns:
            The images by name.
        """
        built = build_all(
            recipes,
            store=self.store,
            budget=budget,
            progress=self._tell,
            on_estimate=self._tell_estimate,
            retry_failed=retry_failed,
            mirrors=self.mirrors,
        )
        for name, error in built.failures.items():
            self.progress.note(f"{name}: not built: {error.what}")
            self.failures[name] = error
        for name in recipes:
            self.seconds[name] = built.seconds.get(name, 0.0)
        self._images.update(built.images)
        return dict(built.images)

    def forget(self, names: Iterable[str]) -> None:
        """Remove images, and what no other image has of them, so that they are built anew."""
        known = set(self.store.image_names())
        remove_images(self.store, [name for name in names if name in known], progress=self.progress.status)

    @contextmanager
    def _own_lock(self, name: str) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            yield

    def _tell(self, event: BuildEvent) -> None:
        what = f"{event.image}: {event.step}" + (f" ({event.detail})" if event.detail else "")
        before = f"{self._left}; " if self._left else ""
        if event.state is StepState.FINISHED:
            with self._lock:
                self.seconds[event.image] = self.seconds.get(event.image, 0.0) + event.seconds
            self.progress.note(f"{what}: {human_size(event.bytes)} in {human_seconds(event.seconds)}")
        elif event.state is StepState.WAITING:
            self.progress.status(f"{before}{what}: another process makes it")
        elif event.state is StepState.STARTED:
            self.progress.status(f"{before}{what}")

    def _tell_failure(self, name: str, done: Future[Image]) -> None:
        error = done.exception()
        if isinstance(error, MiniSandboxError):
            self.progress.note(f"{name}: not built: {error.what}")

    def _tell_estimate(self, estimate: Estimate) -> None:
        self._left = ""
        if estimate.left:
            done = estimate.steps - estimate.left
            self._left = f"step {done + 1} of {estimate.steps}, about {human_seconds(max(estimate.seconds, 1.0))} left"
