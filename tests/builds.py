"""Builds of tasks whose kind is known."""

from __future__ import annotations

from minisandbox.tasks import PythonBuild, Task


def python_build(task: Task) -> PythonBuild:
    """Return how a Python task is built."""
    assert isinstance(task.build, PythonBuild), task.build
    return task.build
