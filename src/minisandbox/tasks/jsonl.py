"""Task files: one JSON object per line, UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from minisandbox.errors import PatchError, TaskFileError
from minisandbox.tasks.rows import task_from_row
from minisandbox.tasks.task import Task


def read_tasks(path: Path) -> tuple[Task, ...]:
    """Read a task file.

    Args:
        path: the file; blank lines are skipped. Relative paths of local sources start at its directory.

    Returns:
        Its tasks, in the file's order.

    Raises:
        TaskFileError: the file is missing, unreadable, empty or not UTF-8, or a line is not a task; ``path``, ``line``
            and ``field`` say where.
        PatchError: a task's patch is malformed or unsafe.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        hint = "check the path; the bundled set is called 'quickstart'" if missing else None
        raise TaskFileError(
            f"task file {path} cannot be read", path=path, reason=error.strerror or str(error), hint=hint
        ) from error
    return tasks_from_bytes(data, path)


def tasks_from_bytes(data: bytes, path: Path) -> tuple[Task, ...]:
    """Read a task file's content; see :func:`read_tasks`.

    Args:
        data: the content.
        path: what errors call it, and where relative paths start.

    Raises:
        TaskFileError: as :func:`read_tasks` raises it.
        PatchError: as :func:`read_tasks` raises it.
    """
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, row in _rows(data, path):
        task = _task(row, path, number)
        if task.instance_id in lines:
            raise TaskFileError(
                f"{path}, line {number}: instance_id {task.instance_id!r} is on line {lines[task.instance_id]} already",
                path=path,
                line=number,
                field="instance_id",
                reason="two files were put together, or a row was copied",
                hint="give each task an id of its own",
            )
        lines[task.instance_id] = number
        tasks.append(task)
    if not tasks:
        raise TaskFileError(
            f"task file {path} is empty", path=path, reason="whatever wrote it failed", hint="write one task per line"
        )
    return tuple(tasks)


def _rows(data: bytes, path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    if data.startswith(b"\xef\xbb\xbf"):
        raise TaskFileError(
            f"{path}, line 1: it begins with a byte order mark",
            path=path,
            line=1,
            reason="an editor saved it as 'UTF-8 with BOM'",
            hint="save it as plain UTF-8",
        )
    if data.startswith((b"\x1f\x8b", b"PAR1")):
        raise TaskFileError(
            f"task file {path} is not text",
            path=path,
            reason="it is compressed, or a Parquet file",
            hint="convert it to JSON Lines",
        )
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield number, _row(raw, path, number)


def _row(raw: bytes, path: Path, number: int) -> dict[str, object]:
    def bad(what: str, reason: str | None = None, hint: str | None = None) -> TaskFileError:
        return TaskFileError(f"{path}, line {number}: {what}", path=path, line=number, reason=reason, hint=hint)

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise bad(f"byte {error.start + 1} is not UTF-8", error.reason, "save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise bad(f"not JSON at column {error.colno} ({error.msg})", *_json_advice(raw, error)) from None
    except _DuplicateKeyError as error:
        raise bad(f"the key {error.args[0]!r} is there twice", None, "keep one of them") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise bad(f"a number in it cannot be read ({error})", None, "write a number that a task can need") from None
    except RecursionError:
        raise bad("its JSON is nested too deeply", "it is not a task", None) from None
    if not isinstance(value, dict):
        hint = "write one object per line, without brackets around all of them" if isinstance(value, list) else None
        raise bad("not a JSON object", "it is JSON, but not JSON Lines", hint)
    return value


def _json_advice(raw: bytes, error: json.JSONDecodeError) -> tuple[str | None, str]:
    """Return the likely reason and what to do."""
    text = raw.strip()
    if text in {b"[", b"{"}:
        return "it is one pretty-printed JSON document, not JSON Lines", "write one object per line"
    if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string"):
        return "the line was cut off", "write the file again"
    return None, "write one JSON object per line"


class _DuplicateKeyError(ValueError):
    """An object has a key twice; Python's JSON reader would keep the last in silence."""


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table: dict[str, object] = {}
    for key, value in pairs:
        if key in table:
            raise _DuplicateKeyError(key)
        table[key] = value
    return table


def _task(row: dict[str, object], path: Path, number: int) -> Task:
    """Make the task of one line; errors get the file, the line and the id."""
    name = row.get("instance_id")
    place = f"{path}, line {number}" + (f" ({name[:200]})" if isinstance(name, str) and name else "")
    try:
        return task_from_row(row, base=path.parent)
    except TaskFileError as error:
        raise TaskFileError(
            f"{place}: {error.what}",
            path=path,
            line=number,
            field=error.field,
            reason=error.reason,
            hint=error.hint,
        ) from None
    except PatchError as error:
        raise PatchError(f"{place}: {error.what}", reason=error.reason, hint=error.hint) from None
