"""Images for tasks, made while the user is told: for every command that needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from minisandbox.cli.output import Progress, human_seconds, human_size
from minisandbox.cli.parallel import in_parallel
from minisandbox.errors import MiniSandboxError
from minisandbox.images import BuildEvent, Image, Recipe, StepState, build
from minisandbox.store import Store
from minisandbox.tasks import Task


@dataclass(slots=True)
class Builder:
    """Builds images of tasks, each at most once, and adds up what that took.

    Attributes:
        store: where the images go.
        progress: where it is told.
        seconds: by image, the seconds that layers made on this occasion took; 0.0 where all was there.
        failures: by image, what kept it from being built.
    """

    store: Store
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, MiniSandboxError] = field(default_factory=dict)
    _images: dict[str, Image] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
                    self._images[name] = self.build(name, task.recipe())
                except MiniSandboxError as error:
                    self.progress.note(f"{name}: not built: {error.what}")
                    self.failures[name] = error.about(name)
                    raise
            return self._images[name]

    def build(self, name: str, recipe: Recipe) -> Image:
        """Build one image and tell how it goes."""
        self.seconds.setdefault(name, 0.0)
        return build(recipe, store=self.store, name=name, progress=self._tell)

    def build_all(self, tasks: Iterable[Task], workers: int) -> dict[str, Image]:
        """Build the images of all tasks that can be built; the others are in ``failures``.

        Args:
            tasks: the tasks.
            workers: builds at once.

        Returns:
            The images by task id.
        """

        def attempt(task: Task) -> tuple[str, Image | None]:
            try:
                return task.instance_id, self.image_of(task)
            except MiniSandboxError:  # kept in failures; one bad task must not cost the others
                return task.instance_id, None

        return {name: image for name, image in in_parallel(attempt, tasks, workers) if image is not None}

    @contextmanager
    def _own_lock(self, name: str) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            yield

    def _tell(self, event: BuildEvent) -> None:
        what = f"{event.image}: {event.step}" + (f" ({event.detail})" if event.detail else "")
        if event.state is StepState.FINISHED:
            self.seconds[event.image] = self.seconds.get(event.image, 0.0) + event.seconds
            self.progress.note(f"{what}: {human_size(event.bytes)} in {human_seconds(event.seconds)}")
        elif event.state is StepState.WAITING:
            self.progress.status(f"{what}: another process makes it")
        elif event.state is StepState.STARTED:
            self.progress.status(what)
