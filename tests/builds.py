"""Builds of tasks whose kind is known."""

from __future__ import annotations

from minisandbox.spec import OciBase, PythonRecipe
from minisandbox.tasks import ContainerBuild, Task


def python_build(task: Task) -> PythonRecipe:
    """Return how a Python task is built."""
    assert isinstance(task.build, PythonRecipe), task.build
    return task.build


def container_build(task: Task) -> ContainerBuild:
    """Return the build of a task over a container image, or a Dockerfile."""
    assert isinstance(task.build, ContainerBuild), task.build
    return task.build


def reference_of(task: Task) -> str:
    """Return the reference of a task's container image."""
    base = container_build(task).base
    assert isinstance(base, OciBase), base
    return base.reference
