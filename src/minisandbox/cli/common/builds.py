"""Build images of tasks and report the progress, for every command that needs images."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.cli.common.output import Progress, human_seconds
from minisandbox.errors import MiniSandboxError
from minisandbox.images import Budget, BuildEvent, Building, Image, StepState, build, build_all
from minisandbox.spec import Buildable, OciBase
from minisandbox.store import Store
from minisandbox.store.collect import remove_images
from minisandbox.values import human_size

if TYPE_CHECKING:
    from minisandbox.images import Pulled
    from minisandbox.tasks import Task


@dataclass(slots=True)
class Builder:
    """Build images of tasks, each at most once, and add up the build times.

    Attributes:
        store: the store for the images.
        progress: the output for progress messages.
        mirrors: a directory of git repositories that are tried before the network.
        backend: isolation backend of the images' sandboxes; "" for namespaces (:attr:`.ImageSpec.backend`).
        seconds: build time of each image's new layers; 0.0 if no layer was built.
        failures: the error that stopped the build, for each image that failed.
        remaining: description of the remaining builds; "" if no build remains or the number is unknown.
    """

    store: Store
    progress: Progress
    mirrors: Path | None = None
    backend: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, MiniSandboxError] = field(default_factory=dict)
    remaining: str = ""
    _images: dict[str, Image] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def image_of(self, task: Task) -> Image:
        """Return a task's image, and build it if necessary; thread-safe.

        Raises:
            MiniSandboxError: the image could not be built, now or in an earlier call.
        """
        name = task.instance_id
        with self._image_lock(name):
            if name in self.failures:
                raise self.failures[name]
            if name not in self._images:
                try:
                    self.seconds.setdefault(name, 0.0)
                    recipe = task.recipe()
                    image = build(recipe, store=self.store, name=name, progress=self.report, mirrors=self.mirrors)
                    self._images[name] = replace(image, backend=self.backend)
                except MiniSandboxError as error:
                    self.failures[name] = error.about(name)
                    raise
            return self._images[name]

    def build_all(
        self, tasks: Iterable[Task], jobs: int | None = None, *, retry_failed: bool = True
    ) -> dict[str, Image]:
        """Build the images of all tasks, and store errors in ``failures``.

        Args:
            tasks: the tasks.
            jobs: number of build steps to run at once; None for one per CPU.
            retry_failed: whether to retry steps that failed in earlier builds.

        Returns:
            The images by task id.
        """
        recipes = {task.instance_id: task.recipe for task in tasks}
        return self.build_recipes(recipes, Budget() if jobs is None else Budget(jobs), retry_failed=retry_failed)

    def begin(self, tasks: Iterable[Task], workers: int) -> Building:
        """Start building the images of all tasks in the background.

        Args:
            tasks: the tasks.
            workers: number of build steps to run at once.
        """
        return Building(
            {task.instance_id: task.recipe for task in tasks},
            store=self.store,
            budget=Budget(jobs=workers),
            progress=self.report,
            on_remaining=self.report_remaining,
            mirrors=self.mirrors,
            backend=self.backend,
        )

    def build_recipes(
        self, recipes: Mapping[str, Callable[[], Buildable]], budget: Budget, *, retry_failed: bool = True
    ) -> dict[str, Image]:
        """Build the images of all recipes, and store errors in ``failures``.

        Args:
            recipes: functions that return a recipe, by image name.
            budget: the resources of this machine that builds may use.
            retry_failed: whether to retry steps that failed in earlier builds.

        Returns:
            The images by name.
        """
        result = build_all(
            recipes,
            store=self.store,
            budget=budget,
            progress=self.report,
            on_remaining=self.report_remaining,
            note=self.progress.note,
            retry_failed=retry_failed,
            mirrors=self.mirrors,
        )
        self.failures.update(result.failures)
        for name in recipes:
            self.seconds[name] = result.seconds.get(name, 0.0)
        images = {name: replace(image, backend=self.backend) for name, image in result.images.items()}
        self._images.update(images)
        return images

    def pull(self, bases: Sequence[OciBase], *, jobs: int, again: Sequence[OciBase]) -> Pulled:
        """Pull container images; see :func:`minisandbox.images.pull_all`."""
        from minisandbox.images import pull_all  # noqa: PLC0415 - loads an HTTP client

        return pull_all(
            bases, store=self.store, jobs=jobs, again=again, progress=self.report, on_remaining=self.report_remaining,
            note=self.progress.note,
        )  # fmt: skip

    def forget(self, names: Iterable[str]) -> None:
        """Remove images and the layers that only they use, so that the next build makes them again."""
        existing = set(self.store.image_names())
        remove_images(self.store, [name for name in names if name in existing], progress=self.progress.status)

    @contextmanager
    def _image_lock(self, name: str) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            yield

    def report(self, event: BuildEvent) -> None:
        """Report the progress of a build step; thread-safe."""
        step = f"{event.image}: {event.step}" + (f" ({event.detail})" if event.detail else "")
        prefix = f"{self.remaining}; " if self.remaining else ""
        if event.state is StepState.FINISHED:
            with self._lock:
                self.seconds[event.image] = self.seconds.get(event.image, 0.0) + event.seconds
            self.progress.note(f"{step}: {human_size(event.bytes)} in {human_seconds(event.seconds)}")
        elif event.state is StepState.WAITING:
            self.progress.status(f"{prefix}{step}: another process builds it")
        elif event.state is StepState.STARTED:
            self.progress.status(f"{prefix}{step}")

    def report_remaining(self, description: str) -> None:
        """Set the description of the remaining builds; thread-safe."""
        self.remaining = description
