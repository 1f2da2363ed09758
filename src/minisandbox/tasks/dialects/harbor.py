"""Harbor's task directories: a row names one under ``harbor``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from minisandbox.tasks.confining import problem_of
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.graders import bad_field
from minisandbox.tasks.harbor import read_task
from minisandbox.tasks.task import Task


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row names a task directory."""
    return "harbor" in row


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of the directory that a row names.

    Raises:
        TaskFileError: it is no task directory, or asks for what is not supported.
    """
    name = row["harbor"]
    if not isinstance(name, str):
        raise bad_field("harbor", f"is {name!r}", hint="give the path of a task directory")
    path = (context.base or Path()) / name
    if (problem := problem_of(path, context.places)) is not None:
        what, reason, hint = problem
        raise bad_field("harbor", what, reason=reason, hint=hint)
    return read_task(path, context)
