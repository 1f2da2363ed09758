"""Read sandbox settings from other programs' configuration files: image, tasks, limits, network.

The settings are a pydantic model, because these programs use pydantic too.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from minisandbox.errors import InvalidValue, MiniSandboxError, NotFound
from minisandbox.images import BuildEvent, Image, StepState, build, host_image, load_image
from minisandbox.spec import Buildable
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet, read_recipe
from minisandbox.types import Limits, Network

TASKS_VARIABLE = "MINISANDBOX_TASKS"
"""The environment variable with the task set, used if the configuration names no tasks."""
HOST = "host"

_LOG = logging.getLogger("minisandbox.integrations")
# Matches docker.io/swebench/sweb.eval.x86_64.django_1776_django-11099:latest, where _1776_ stands for "__".
_OFFICIAL = re.compile(r"(?:.*/)?sweb\.eval\.[^.]+\.(?P<id>[^:]+)(?::.*)?")
_LOADING = threading.Lock()
# Redirect before the program starts: bash reports some errors before a redirection in its command takes effect.
MERGED_STREAMS = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")
"""Arguments to put before a command's arguments, so that its stderr goes to its stdout."""


class SandboxSettings(BaseModel):
    """Settings of sandboxes in another program's configuration. Unknown keys are errors.

    Attributes:
        image: an image in the store, an ``instance_id`` of ``tasks``, SWE-bench's docker image of an instance, a
            recipe file (``.toml``), or ``host`` for only the host's ``/usr``.
        tasks: a task set, as in the argument TASKS of all commands; missing images are built on demand.
            ``$MINISANDBOX_TASKS`` by default; "" for no tasks.
        layout: the layout of the rows; None to detect it from the columns.
        pins: exported environments of the data set's official images.
        environment: ``pins``, ``image`` or ``auto``: how to build the environments of rows whose data set publishes
            container images.
        repo_mirrors: local git repositories to fetch commits from before using the network.
        allow_local_sources: whether rows may refer to host directories outside the directory of their file.
        limits: resource limits by the names of :class:`minisandbox.Limits`, for instance ``{"memory": "8G"}``.
        network: ``off`` or ``host``.
        allow: hosts that are reachable by HTTP(S) while the network is off, as in ``Network.allow``.
        allow_private: whether these hosts may have private addresses.
    """

    model_config = ConfigDict(extra="forbid")

    image: str = ""
    tasks: str = Field(default_factory=lambda: os.environ.get(TASKS_VARIABLE, ""))
    layout: str | None = None
    pins: Path | None = None
    environment: Literal["auto", "pins", "image"] = "auto"
    repo_mirrors: Path | None = None
    allow_local_sources: bool = False
    limits: dict[str, int | float | str | None] = Field(default_factory=dict)
    network: Literal["off", "host"] = "off"
    allow: list[str] = Field(default_factory=list)
    allow_private: bool = False

    def checked_limits(self) -> Limits:
        """Return the validated limits.

        Raises:
            InvalidValue: a limit is unknown, or its value is invalid.
        """
        try:
            return Limits(**self.limits)  # type: ignore[arg-type] # unknown names are rejected below
        except TypeError as error:
            names = ", ".join(Limits.__slots__)
            raise InvalidValue(f"limits {self.limits}: {error}", hint=f"the limits are {names}") from error

    def checked_network(self) -> Network:
        """Return the validated network.

        Raises:
            InvalidValue: the settings contradict each other, or a host is not a valid pattern.
        """
        if not self.allow:
            return Network(self.network)
        if self.network == "host":
            raise InvalidValue("network 'host' cannot be combined with allow", hint="leave out one of them")
        return Network.allow(*self.allow, private=self.allow_private)

    def find(self, name: str) -> TaskImage:
        """Find an image; build the missing image of a task or recipe.

        Args:
            name: any value of :attr:`image`.

        Raises:
            NotFound: there is no such image.
            MiniSandboxError: the tasks cannot be read, or the build fails; the message names the task.
        """
        store = Store.open()
        if name.endswith(".toml"):
            recipe = read_recipe(Path(name))
            return TaskImage(_build(recipe, store, Path(name).stem, self.repo_mirrors), None)
        if self.tasks:
            tasks = self._task_set()
            if instance_id := _match(name, tasks.ids):
                return build_task(tasks[instance_id], store, self.repo_mirrors)
        if image_name := _match(name, store.image_names()):
            return TaskImage(load_image(store, image_name), None)
        if name == HOST:
            return TaskImage(host_image(store), None)
        raise self._unknown(name, store)

    def _task_set(self) -> TaskSet:
        with _LOADING:  # let one caller load the tasks, which may take a download
            return _load(
                self.tasks,
                form=self.layout,
                pins=self.pins,
                environment=self.environment,
                repo_mirrors=self.repo_mirrors,
                allow_local_sources=self.allow_local_sources,
            )

    def _unknown(self, name: str, store: Store) -> NotFound:
        search = f"tasks {self.tasks!r} have no such instance_id" if self.tasks else "no tasks are named"
        return NotFound(
            f"no image {name!r} in the store {store.root}",
            reason=f"it was not built here, and {search}",
            hint="'minisandbox image build TASKS' builds the images of a task set; the option 'tasks', or "
            f"{TASKS_VARIABLE}=TASKS, builds them on demand; 'minisandbox image ls' lists them",
        )


@dataclass(frozen=True, slots=True)
class TaskImage:
    """An image, and the task that it belongs to.

    Attributes:
        image: the image.
        task: the task; None if the image belongs to no task.
    """

    image: Image
    task: Task | None


def build_task(task: Task, store: Store, mirrors: Path | None) -> TaskImage:
    """Build a task's image, reusing existing layers. Threads and processes may build the same image concurrently."""
    return TaskImage(_build(task.recipe(), store, task.instance_id, mirrors), task)


def _build(recipe: Buildable, store: Store, name: str, mirrors: Path | None) -> Image:
    try:
        return build(recipe, store=store, name=name, progress=_log_progress, mirrors=mirrors)
    except MiniSandboxError as error:
        raise error.about(name) from None


def _log_progress(event: BuildEvent) -> None:
    step = f"{event.image}: {event.step}" + (f" ({event.detail})" if event.detail else "")
    if event.state is StepState.STARTED:
        _LOG.info("building %s", step)
    elif event.state is StepState.FINISHED:
        _LOG.info("built %s in %.1f s", step, event.seconds)


# programs create many environments independently, so cache the loaded tasks for all of them
_load = functools.lru_cache(maxsize=4)(TaskSet.load)


def _match(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate with this name, or the instance with this docker image, whose name is in lower case."""
    names = list(candidates)
    if name in names:
        return name
    official = _OFFICIAL.fullmatch(name)
    if official is None:
        return None
    instance_id = official["id"].replace("_1776_", "__").lower()
    matches = [candidate for candidate in names if candidate.lower() == instance_id]
    return matches[0] if len(matches) == 1 else None
