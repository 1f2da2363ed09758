"""Convert rows to tasks, with errors that name the file, the line and the id."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from minisandbox.errors import HarnessError, InvalidValue, PatchError, TaskFileError
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects import convert
from minisandbox.tasks.formats.jsonl import Row
from minisandbox.tasks.task import Task

Refused = TaskFileError | PatchError
"""The error for a row that cannot be converted to a task."""


def tasks_of(
    rows: Iterable[Row],
    path: Path,
    context: LoadContext,
    *,
    form: str | None = None,
    on_refused: Callable[[Refused], None] | None = None,
) -> Iterator[tuple[Task, Row]]:
    """Convert rows to tasks lazily.

    Args:
        rows: the rows.
        path: the name of the task set in errors.
        context: the settings of the conversion.
        form: the layout of all rows; None: the columns of each row decide.
        on_refused: called with the error of an invalid row, which is then skipped; None: raise the error.

    Returns:
        Pairs of a task and its row.

    Raises:
        TaskFileError: a row is invalid, an id is duplicated, or there are no rows.
        PatchError: a task's patch is malformed or unsafe.
    """
    rows_by_id: dict[str, Row] = {}
    with contextlib.closing(rows) if isinstance(rows, Generator) else contextlib.nullcontext():
        for row in rows:
            try:
                task = _task(row, context, form)
                if task.instance_id in rows_by_id:
                    raise _twice(task.instance_id, row, rows_by_id[task.instance_id])
            except (TaskFileError, PatchError) as error:
                if on_refused is None:
                    raise
                on_refused(error)
                continue
            rows_by_id[task.instance_id] = row
            yield task, row
    if not rows_by_id and on_refused is None:
        raise TaskFileError(
            f"task file {path} is empty", path=path, reason="whatever wrote it failed", hint="write one task per line"
        )


def _twice(instance_id: str, row: Row, earlier: Row) -> TaskFileError:
    position = f"on {earlier.unit} {earlier.number}" if earlier.path == row.path else f"in {earlier.place}"
    return TaskFileError(
        f"{row.place}: instance_id {instance_id!r} is {position} already",
        path=row.path,
        line=row.number,
        field="instance_id",
        reason="two files were put together, or a row was copied",
        hint="give each task an id of its own",
    )


def _task(row: Row, context: LoadContext, form: str | None) -> Task:
    """Convert one row, with errors that name the file, the line and the id."""
    name = row.values.get("instance_id")
    position = row.place + (f" ({name[:200]})" if isinstance(name, str) and name else "")
    try:
        return convert(row.values, context, form=form)
    except (TaskFileError, InvalidValue, HarnessError) as error:  # in the row, --pins, or benchmark code
        if isinstance(error, TaskFileError) and error.path is not None:
            raise
        raise TaskFileError(
            f"{position}: {error.what}",
            path=row.path,
            line=row.number,
            field=error.field if isinstance(error, TaskFileError) else None,
            reason=error.reason,
            hint=error.hint,
        ) from None
    except PatchError as error:
        raise error.about(position) from None
