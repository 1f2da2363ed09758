"""Read JSON files with one document: a list of rows, or an object with a row for each id."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path

from minisandbox.errors import TaskFileError
from minisandbox.tasks.formats.jsonl import Row, json_lines, json_value, refuse_what_is_not_text


class Layout(enum.StrEnum):
    """The storage format of a set of rows."""

    JSONL = "jsonl"
    """One JSON object per line."""

    JSON = "json"
    """A JSON list of objects."""

    JSON_BY_ID = "json by id"
    """A JSON object with one row per ``instance_id``."""

    PARQUET = "parquet"
    """An Apache Parquet file."""

    DISK = "disk"
    """A folder that ``datasets.load_from_disk`` reads."""


def json_file(content: bytes, path: Path) -> tuple[Layout, Iterator[Row]]:
    """Read a ``.json`` file, which may also contain JSON Lines.

    Args:
        content: the content of the file.
        path: the name of the file in errors.

    Returns:
        The storage format of the rows, and the rows.

    Raises:
        TaskFileError: the file is not JSON, or contains no rows; ``line`` has the position.
    """
    refuse_what_is_not_text(content, path)
    if _is_lines(content):
        return Layout.JSONL, json_lines(content.split(b"\n"), path)
    value = json_value(content, path, line=None) if content.strip() else []
    if isinstance(value, list):
        return Layout.JSON, _listed(value, path)
    if isinstance(value, dict) and ("instance_id" in value or isinstance(value.get("messages"), list)):
        return Layout.JSON, _listed([value], path)
    if isinstance(value, dict):
        return Layout.JSON_BY_ID, _by_id(value, path)
    raise TaskFileError(
        f"{path}: neither a list nor an object", path=path, hint="write a list of objects, or one object per line"
    )


def _is_lines(content: bytes) -> bool:
    """Return whether the first line is a complete JSON object that does not map ids to rows."""
    first_line, _, following = content.lstrip().partition(b"\n")
    if not first_line.startswith(b"{"):
        return False
    try:
        value = json_value(first_line, Path(), line=1)
    except TaskFileError:
        return False
    return bool(following.strip()) or not isinstance(value, dict) or not _are_rows(value)


def _are_rows(value: dict[str, object]) -> bool:
    return "instance_id" not in value and bool(value) and all(isinstance(row, dict) for row in value.values())


def _listed(value: list[object], path: Path) -> Iterator[Row]:
    for row_number, row in enumerate(value, start=1):
        yield _row(row, path, row_number, f"row {row_number}")


def _by_id(value: dict[str, object], path: Path) -> Iterator[Row]:
    for row_number, (name, row_value) in enumerate(value.items(), start=1):
        row = _row(row_value, path, row_number, f"the value of {name[:200]!r}")
        if row.values.setdefault("instance_id", name) != name:
            raise TaskFileError(
                f"{path}: the row of {name[:200]!r} has the instance_id {row.values['instance_id']!r}",
                path=path,
                line=row_number,
                field="instance_id",
                hint="give both the same id",
            )
        yield row


def _row(value: object, path: Path, row_number: int, description: str) -> Row:
    if isinstance(value, dict):
        return Row(value, path, row_number)
    raise TaskFileError(
        f"{path}: {description} is not an object",
        path=path,
        line=row_number,
        reason="the file is JSON, but no rows of a dataset",
        hint="write a list of objects, or an object with the row of each instance_id",
    )
