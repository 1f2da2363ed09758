"""Read JSON objects with type checks, with errors that name the field; convert dataclasses to JSON objects."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import json
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from minisandbox.errors import TaskFileError
from minisandbox.spec import Variables
from minisandbox.tasks.context import LoadContext, problem_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Read = TypeVar("Read")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (str, "a string"),
    (int, "a number"),
    (float, "a number"),
    (list, "a list"),
    (dict, "an object"),
)
HINTS = {
    "instance_id": "give the task an id of its own, e.g. 'owner__name-123'",
    "repo": "give the repository as 'owner/name'",
    "problem_statement": "say what the agent has to do",
    "patch": "give the fix (swebench) or the bug (swesmith) as a unified diff",
    "test.timeout": "give seconds, e.g. 300",
    "build": 'say how the image is made: {"python": ">=3.11", "requirements": [], "source": {...}, "install": []}, '
    '{"image": "REFERENCE"} or {"dockerfile": "PATH"}',
    "test": 'say how the tests are run: {"command": "python -m pytest", "timeout": 300}',
    "test.command": "say how the tests are run, e.g. 'python -m pytest'",
    "form": "'swebench' where patch is the fix, 'swesmith' where it is the bug, 'buggy' where it is applied already",
    "FAIL_TO_PASS": "the ids of the tests that fail before the fix and pass after it, as a list",
    "PASS_TO_PASS": "the ids of the tests that pass before and after the fix, as a list (it may be empty)",
}
"""Hints for errors, by the full name of the field."""


def bad_field(field: str, problem: str, *, reason: str | None = None, hint: str | None = None) -> TaskFileError:
    """Create the error for an invalid field of a task."""
    return TaskFileError(f"field {field!r} {problem}", field=field, reason=reason, hint=hint)


class Fields:
    """Read the values of one JSON object with type checks; each method raises TaskFileError, which names the field.

    Args:
        row: the object.
        prefix: the prefix of the keys in error messages, e.g. ``"build."``.
        keys: the allowed keys; None allows any.
        context: the directory for relative paths, and the directories that paths may be in.
    """

    def __init__(
        self,
        row: Mapping[str, object],
        prefix: str = "",
        *,
        keys: Collection[str] | None = None,
        context: LoadContext | None = None,
    ) -> None:
        self.row = row
        self.context = context or LoadContext()
        self._prefix = prefix
        for key in row if keys is not None else ():
            if key not in (keys or ()):
                similar = difflib.get_close_matches(key, keys or (), n=1)
                hint = f"did you mean {similar[0]!r}?" if similar else f"known are {', '.join(keys or ())}"
                raise self.error(key, "is unknown", hint=hint)

    def error(self, key: str, problem: str, *, reason: str | None = None, hint: str | None = None) -> TaskFileError:
        """Create the error for an invalid field of this object."""
        return bad_field(self._prefix + key, problem, reason=reason, hint=hint)

    def read(self, kind: type[Read], **preset: object) -> Read:
        """Fill a dataclass from the keys named like its fields; fields without a key keep their defaults.

        Args:
            kind: the dataclass.
            preset: values of fields that are not read from the object.
        """
        readers: dict[object, Callable[[str], object]] = {
            str: self.text, str | None: self.text, float: self.number, bool: self.flag, tuple[str, ...]: self.texts,
            Variables: self.variables, Path: self.path, Path | None: self.path,
        }  # fmt: skip
        types = _types(kind)  # type: ignore[arg-type] # classes are hashable
        for field in dataclasses.fields(kind):  # type: ignore[arg-type] # it is a dataclass
            needed = field.default is dataclasses.MISSING
            if field.init and field.name not in preset and (needed or self.row.get(field.name) is not None):
                preset[field.name] = readers[types[field.name]](field.name)
        return kind(**preset)

    def nested(self, key: str, *, keys: Collection[str] | None = None) -> Fields:
        """Return a nested object, as fields with an extended prefix."""
        return Fields(self.table(key), f"{self._prefix}{key}.", keys=keys, context=self.context)

    def confine(self, key: str, problem: tuple[str, str, str] | None) -> None:
        """Raise the error for a problem that :mod:`.context` found, if any."""
        if problem is not None:
            what, reason, hint = problem
            raise self.error(key, what, reason=reason, hint=hint)

    def path(self, key: str) -> Path:
        """Return a host path, after a check that rows may name it."""
        path = (self.context.base or Path()) / self.text(key)
        self.confine(key, problem_of(path, self.context.places))
        return path

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        if default is not None and self.row.get(key) is None:
            return default
        return self._text(key, self._required(key))

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a number as a float."""
        value = self._required(key) if default is None else self.row.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.error(key, "is too large a number", hint=HINTS.get(self._prefix + key)) from None

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self._required(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def variables(self, key: str) -> Variables:
        """Return an object as environment variables."""
        table = self.nested(key)
        for name in table.row:
            if not _VARIABLE.fullmatch(name):
                raise self.error(key, f"has the name {name!r}", hint="use letters, digits and '_'")
        return tuple((name, table.text(name)) for name in table.row)

    def table(self, key: str) -> Mapping[str, object]:
        """Return an object; it may be JSON in a string, because a Parquet column has one type for all rows."""
        value = self._decoded(key, "give an object")
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings as a tuple."""
        return self._items(key, self._required(key))

    def ids(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; it may be JSON in a string."""
        return self._items(key, self._decoded(key, 'give a list: ["tests/test_x.py::test_y"]'))

    def commands(self, *keys: str) -> tuple[str, ...]:
        """Return the shell commands of the first key that is not empty: a string, or a list of strings."""
        for key in keys:
            value = self.row.get(key)
            if value is None or value in ("", []):
                continue
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
                raise self.error(
                    key, "is neither a command nor a list of commands", hint="give a string, or a list of strings"
                )
            return tuple(item for item in items if item.strip())
        return ()

    def requirements(self, key: str) -> tuple[str, ...]:
        """Return requirements from a list or the text of a requirements file, without comments and options."""
        value = self.row.get(key)
        lines = value.splitlines() if isinstance(value, str) else [] if value is None else value
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            hint = "give a list of strings, or the text of a requirements file"
            raise self.error(key, "holds no requirements", hint=hint)
        plain = (line.partition(" #")[0].strip() for line in lines)
        return tuple(dict.fromkeys(line for line in plain if line and not line.startswith(("#", "-"))))

    def _required(self, key: str) -> object:
        if key not in self.row:
            similar = difflib.get_close_matches(key.lower(), [name.lower() for name in self.row], n=1)
            reason = f"it is spelt differently: {similar[0]!r}" if similar else None
            raise self.error(key, "is missing", reason=reason, hint=HINTS.get(self._prefix + key))
        return self.row[key]

    def _decoded(self, key: str, hint: str) -> object:
        value = self._required(key)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.error(key, "is a string that is not JSON", reason=str(error), hint=hint) from None

    def _items(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise self._wrong(key, value, "a list of strings")
        return tuple(self._text(f"{key}[{index}]", item) for index, item in enumerate(value))

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                key, f"has half of a surrogate pair at character {error.start}", hint="write the character itself"
            ) from None
        return value

    def _wrong(self, key: str, value: object, expected: str) -> TaskFileError:
        actual = (
            "null" if value is None else next((name for kind, name in _KINDS if isinstance(value, kind)), "unknown")
        )
        return self.error(key, f"is {actual}, not {expected}", hint=HINTS.get(self._prefix + key))


@functools.cache
def _types(kind: object) -> Mapping[str, object]:
    return typing.get_type_hints(kind)


def keys_of(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the field names of a dataclass, which are the keys of its JSON object."""
    return tuple(field.name for field in dataclasses.fields(kind))


def object_of(value: DataclassInstance, always: Iterable[str] = ()) -> dict[str, object]:
    """Convert a dataclass to a JSON object, without the fields that have their default value.

    Args:
        value: the dataclass.
        always: names of fields that are always included.
    """
    return {
        field.name: _plain(_types(type(value))[field.name], getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name in always or getattr(value, field.name) != field.default
    }


def _plain(kind: object, value: object) -> object:
    if isinstance(value, tuple):
        return dict(value) if kind == Variables else list(value)
    if isinstance(value, enum.Enum):
        return value.value
    return value.to_row() if hasattr(value, "to_row") else str(value) if isinstance(value, Path) else value
