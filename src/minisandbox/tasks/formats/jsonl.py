"""Read JSON Lines: one JSON object per line, in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import TaskFileError

_BOM = b"\xef\xbb\xbf"
_NOT_TEXT = (b"\x1f\x8b", b"PAR1")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a task set, and its position in the file.

    Attributes:
        values: the columns.
        path: the file.
        number: the line number, or the row number if the format has no lines; both start at 1.
        unit: ``line`` or ``row``, for the kind of ``number``.
    """

    values: dict[str, object]
    path: Path
    number: int
    unit: str = "row"

    @property
    def place(self) -> str:
        """The file and the line or row, for messages."""
        return f"{self.path}, {self.unit} {self.number}"


def json_lines(lines: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Read JSON Lines lazily.

    Args:
        lines: the lines; blank lines are skipped.
        path: the name of the file in errors.

    Raises:
        TaskFileError: a line is not a JSON object; ``line`` has its number.
    """
    for line_number, raw in enumerate(lines, start=1):
        if line_number == 1:
            refuse_what_is_not_text(raw, path)
        if raw.strip():
            yield Row(_object(raw.removesuffix(b"\n"), path, line_number), path, line_number, "line")


def refuse_what_is_not_text(content: bytes, path: Path) -> None:
    """Reject a file that begins with a byte order mark, or is compressed or Parquet.

    Raises:
        TaskFileError: the data has such a beginning.
    """
    if content.startswith(_BOM):
        raise TaskFileError(
            f"{path}, line 1: it begins with a byte order mark",
            path=path,
            line=1,
            reason="an editor saved it as 'UTF-8 with BOM'",
            hint="save it as plain UTF-8",
        )
    if content.startswith(_NOT_TEXT):
        raise TaskFileError(
            f"task file {path} is not text",
            path=path,
            reason="it is compressed, or a Parquet file",
            hint="convert it to JSON Lines",
        )


def json_value(raw: bytes, path: Path, *, line: int | None) -> object:
    """Parse one JSON value from a line or from a whole file.

    Args:
        raw: the JSON text.
        path: the name of the file in errors.
        line: the line number; None for a whole file.

    Raises:
        TaskFileError: the text is not JSON, or an object has a duplicate key; ``line`` has the position.
    """

    def bad(what: str, reason: str | None = None, hint: str | None = None, *, at: int | None = line) -> TaskFileError:
        where = str(path) if at is None else f"{path}, line {at}"
        return TaskFileError(f"{where}: {what}", path=path, line=at, reason=reason, hint=hint)

    def line_of(offset: int) -> int:
        return (line or 1) + raw.count(b"\n", 0, offset)

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        byte = error.start - raw.rfind(b"\n", 0, error.start)
        what = f"byte {byte} is not UTF-8"
        raise bad(what, error.reason, "save the file as UTF-8", at=line_of(error.start)) from None
    except json.JSONDecodeError as error:
        what = f"not JSON at column {error.colno} ({error.msg})"
        raise bad(what, *_advice(error, in_line=line is not None), at=(line or 1) + error.lineno - 1) from None
    except _DuplicateKeyError as error:
        raise bad(f"the key {error.args[0]!r} is there twice", None, "keep one of them") from None
    except ValueError as error:  # an integer has more digits than Python converts
        raise bad(f"a number in it cannot be read ({error})", None, "write a number that a task can need") from None
    except RecursionError:
        raise bad("its JSON is nested too deeply", "it is not a task", None) from None


def _object(raw: bytes, path: Path, line_number: int) -> dict[str, object]:
    value = json_value(raw, path, line=line_number)
    if not isinstance(value, dict):
        hint = (
            "write one object per line, without brackets around all of them, or call the file .json"
            if isinstance(value, list)
            else None
        )
        raise TaskFileError(
            f"{path}, line {line_number}: not a JSON object",
            path=path,
            line=line_number,
            reason="it is JSON, but not JSON Lines",
            hint=hint,
        )
    return value


def _advice(error: json.JSONDecodeError, *, in_line: bool) -> tuple[str | None, str]:
    """Return the likely reason of a JSON error, and a hint."""
    if in_line and error.doc.strip() in {"[", "{"}:
        reason = "it is one pretty-printed JSON document, not JSON Lines"
        return reason, "write one object per line, or call the file .json"
    if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string"):
        return f"the {'line' if in_line else 'file'} was cut off", "write the file again"
    return None, "write one JSON object per line" if in_line else "write a list of objects, or one object per line"


class _DuplicateKeyError(ValueError):
    """An object has a duplicate key; Python's JSON parser would silently keep the last value."""


def _no_duplicates(items: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(items)
    if len(table) != len(items):
        keys: set[str] = set()
        raise _DuplicateKeyError(next(key for key, _ in items if key in keys or keys.add(key)))  # type: ignore[func-returns-value] # add() returns None
    return table
