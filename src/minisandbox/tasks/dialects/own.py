"""MiniSandbox's own layout: SWE-bench's field names, ``form``, ``build`` and ``test`` (docs/task-files.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.errors import TaskFileError
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.rows import task_from_own_row
from minisandbox.tasks.task import Task

_TABLES = ("build", "test", "solution", "needs")


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row says itself how it is built and tested."""
    return not row.keys().isdisjoint(("form", "build", "test"))


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing, unknown, or has a value that cannot be used.
        PatchError: a patch is malformed or unsafe.
    """
    texts = {key: row[key] for key in _TABLES if isinstance(row.get(key), str)}
    decoded = {key: _decoded(key, str(value)) for key, value in texts.items()}
    return task_from_own_row(
        {**row, **decoded}, base=context.base, places=context.places, public_network=context.public_network
    )


def _decoded(key: str, text: str) -> object:
    """Columns of Parquet have one type for all rows; an object that differs from row to row is JSON there."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskFileError(
            f"field {key!r} is a string that is not JSON", field=key, reason=str(error), hint="give an object"
        ) from None
