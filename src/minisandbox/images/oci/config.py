"""Read the ``config`` of a container image; ignore malformed fields with a note (image-spec, config.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import cast

from minisandbox.values import JSONValue

_TEXTS = ("User", "WorkingDir", "StopSignal")
_LISTS = ("Env", "Entrypoint", "Cmd", "Shell", "OnBuild")
_OBJECTS = ("Labels", "ExposedPorts", "Volumes", "Healthcheck")
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(_TEXTS, str), **dict.fromkeys(_LISTS, list), **dict.fromkeys(_OBJECTS, dict),
}  # fmt: skip
_NAMES = {name.lower(): name for name in _KINDS}
_SETS = ("ExposedPorts", "Volumes")
_LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run configuration of a container image.

    Attributes:
        fields: the well-formed fields of ``config``, in the form that engines write.
        notes: one line for each ignored field or entry, shown to users.
    """

    fields: Mapping[str, JSONValue]
    notes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables; if a name occurs several times, the last value wins, as in containers."""
        return dict(row.split("=", 1) for row in cast("Sequence[str]", self.fields.get("Env", ())))

    @property
    def workdir(self) -> str:
        """The initial directory of commands."""
        return "/" + os.path.normpath(f"/{self.fields.get('WorkingDir', '')}").lstrip("/")

    @property
    def user(self) -> str:
        """The user of commands: ``USER[:GROUP]``, or "" for root."""
        return str(self.fields.get("User", ""))


def read_config(config: JSONValue) -> RunConfig:
    """Read a ``config`` like container engines: ignore case in names, drop null, and accept a string for a list.

    Engines reject some malformed fields, which are safe to ignore here because they do not affect the image's files.
    """
    notes: list[str] = []
    if config is not None and not isinstance(config, dict):
        notes.append(_ignored("config", config))
    config_fields: dict[str, JSONValue] = config if isinstance(config, dict) else {}
    canonical = {_NAMES.get(name.lower(), name): field for name, field in config_fields.items()}
    fields = {name: _read_field(name, field, notes) for name, field in canonical.items()}
    return RunConfig({name: field for name, field in fields.items() if field is not None}, tuple(notes))


def volumes(fields: Mapping[str, JSONValue]) -> tuple[PurePosixPath, ...]:
    """Return the absolute paths of a configuration's ``Volumes``."""
    paths = cast("Mapping[str, JSONValue]", fields.get("Volumes") or {})
    return tuple(PurePosixPath(os.path.normpath(path)) for path in paths if path.startswith("/"))


def _read_field(name: str, field: JSONValue, notes: list[str]) -> JSONValue:
    """Return a field in the form that engines write, or None if it is malformed."""
    kind = _KINDS.get(name)
    if kind is None or field is None:  # keep unknown fields unchecked, although engines drop them
        return field
    if kind is list and isinstance(field, str):  # moby, StrSlice.UnmarshalJSON
        field = [field]
    if isinstance(field, list) and name == "Env":
        notes.extend(_ignored("the variable", row) for row in field if not _is_variable(row))
        return [row for row in field if _is_variable(row)]
    if isinstance(field, dict) and name == "Labels":
        notes.extend(_ignored(f"the label {key!r}", text) for key, text in field.items() if not _is_text(text))
        return {key: text for key, text in field.items() if _is_text(text)}
    items = [*field] if isinstance(field, list | dict) else [field]
    if not isinstance(field, kind) or not all(_is_text(text) for text in items):
        notes.append(_ignored(name, field))
        return None
    return {str(key): {} for key in items} if name in _SETS else field


def _is_text(value: JSONValue) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_variable(row: JSONValue) -> bool:
    return isinstance(row, str) and "\0" not in row and "=" in row[1:]


def _ignored(subject: str, value: JSONValue) -> str:
    return f"{subject} is ignored: {value!r:.{_LONGEST_SHOWN}}"
