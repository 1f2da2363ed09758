"""Images in container engines, for tests: removed when the process ends."""

from __future__ import annotations

import atexit
from dataclasses import replace
from functools import cache

import pytest

from minisandbox.errors import HostError
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.engines.client import Client
from minisandbox.sandbox.engines.images import reference_of
from minisandbox.types import ImageSpec


def in_engine(engine: str, image: ImageSpec) -> ImageSpec:
    """The image as one of an engine; skips where the engine does not work."""
    image = replace(image, backend=engine)
    if (reason := _why_not(image)) is not None:
        pytest.skip(f"{engine}: {reason}")
    return image


@cache
def _why_not(image: ImageSpec) -> str | None:
    """Why an engine makes no container here, or None."""
    try:
        client = Client.find(image.backend)
        atexit.register(client.succeeds, "image", "rm", "--force", reference_of(image))
        Sandbox.create(image).stop()
    except HostError as error:
        return str(error)
    return None
