"""What a step is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.images.runner import Work
from minisandbox.store.keys import JSONValue


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a build.

    Attributes:
        name: what people and logs call it.
        definition: everything that decides what it makes; hashed into its key.
        prepare: called with a staging directory when the step has to be made; returns what the sandbox is to do.
        detail: for people.
    """

    name: str
    definition: Mapping[str, JSONValue]
    prepare: Callable[[Path], Work]
    detail: str = ""
