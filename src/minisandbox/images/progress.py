"""Progress events of builds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class StepState(enum.Enum):
    """The state of a step."""

    STARTED = "started"
    WAITING = "waiting"
    FINISHED = "finished"
    CACHED = "cached"


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """A progress event of a build.

    Attributes:
        image: the image's name.
        step: the step's name: ``base``, ``python``, ``requirements``, ``run``, ``source``, ``install``, ``task``,
            ``tests`` and the like.
        state: started; waiting (another process makes it); finished; cached (it was there).
        key: the layer's key.
        seconds: wall seconds the layer took to make, once it is there.
        bytes: bytes it takes on disk, once it is there.
        detail: the interpreter's version, the project; for people.
    """

    image: str
    step: str
    state: StepState
    key: str
    seconds: float = 0.0
    bytes: int = 0
    detail: str = ""


Progress = Callable[[BuildEvent], None]
