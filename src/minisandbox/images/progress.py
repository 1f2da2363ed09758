"""Describe the progress of builds by events."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class StepState(enum.Enum):
    """The state of a build step."""

    STARTED = "started"
    WAITING = "waiting"
    FINISHED = "finished"
    CACHED = "cached"


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """A progress event of a build.

    Attributes:
        image: the image's name.
        step: the step's name, for example ``base``, ``python``, ``requirements``, ``run``, ``source``, ``install``,
            ``task`` or ``tests``.
        state: the state: started, waiting (another process builds the layer), finished, or cached (the store has the
            layer).
        key: the layer's key.
        seconds: the wall-clock seconds that the layer took to build, once it exists.
        bytes: the bytes of the layer on disk, once it exists.
        detail: details for users, for example the interpreter's version or the project.
    """

    image: str
    step: str
    state: StepState
    key: str
    seconds: float = 0.0
    bytes: int = 0
    detail: str = ""


Progress = Callable[[BuildEvent], None]
