"""Images: from recipes to stacks of layers that sandboxes are made from."""

from __future__ import annotations

from minisandbox.images.builder import build
from minisandbox.images.image import (
    Image,
    ImageSize,
    host_image,
    image_sizes,
    list_images,
    load_image,
    total_size,
)
from minisandbox.images.interpreters import find_interpreter, installed_interpreters
from minisandbox.images.probe import Interpreter
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.images.recipe import GitSource, LocalSource, Recipe, SdistSource, Source

__all__ = [
    "BuildEvent",
    "GitSource",
    "Image",
    "ImageSize",
    "Interpreter",
    "LocalSource",
    "Progress",
    "Recipe",
    "SdistSource",
    "Source",
    "StepState",
    "build",
    "find_interpreter",
    "host_image",
    "image_sizes",
    "installed_interpreters",
    "list_images",
    "load_image",
    "total_size",
]
