"""Images: from recipes to stacks of layers that sandboxes are made from."""

from __future__ import annotations

from minisandbox.images.background import Building
from minisandbox.images.builder import build
from minisandbox.images.estimate import Estimate
from minisandbox.images.failures import Failures
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
from minisandbox.images.lock import Difference, Lock, Package, compare_locks, lock_of, read_lock
from minisandbox.images.pins import Pins, read_pins
from minisandbox.images.probe import Interpreter
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.images.recipe import GitSource, LocalSource, Recipe, SdistSource, Source
from minisandbox.images.schedule import Budget, Built, build_all

__all__ = [
    "Budget",
    "BuildEvent",
    "Building",
    "Built",
    "Difference",
    "Estimate",
    "Failures",
    "GitSource",
    "Image",
    "ImageSize",
    "Interpreter",
    "LocalSource",
    "Lock",
    "Package",
    "Pins",
    "Progress",
    "Recipe",
    "SdistSource",
    "Source",
    "StepState",
    "build",
    "build_all",
    "compare_locks",
    "find_interpreter",
    "host_image",
    "image_sizes",
    "installed_interpreters",
    "list_images",
    "load_image",
    "lock_of",
    "read_lock",
    "read_pins",
    "total_size",
]
