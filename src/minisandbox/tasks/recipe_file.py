"""Recipe files: one image, described by the keys of a task's ``build``; with ``base``, by steps over a base."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.tasks.rows import build_spec

if TYPE_CHECKING:
    from minisandbox.images.recipe import Base, Buildable, Recipe, Run

_KEYS = ("base", "platform", "workdir", "user", "step")
_STEP_KEYS = ("run", "environment", "workdir", "user", "network")


def read_recipe(path: Path) -> Buildable:
    """Read a recipe file: the keys of a task's ``build``, as TOML; with ``base``, also steps over it.

    Args:
        path: the file; relative paths in it are below its directory.

    Raises:
        InvalidValue: it cannot be read, or a key or value in it cannot be used.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        folder = path.absolute().parent
        return _over_base(table, folder) if "base" in table else build_spec(table, base=folder).recipe()
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}", hint="give a recipe (.toml) or a task set") from error
    except ValueError as error:
        if isinstance(error, InvalidValue):
            raise error.about(str(path)) from error
        if isinstance(error, TaskFileError):
            what = error.what.replace("'build.", "'")
            raise InvalidValue(f"{path}: {what}", reason=error.reason, hint=error.hint) from error
        raise InvalidValue(f"{path} is not TOML", reason=str(error)) from error


def _over_base(table: Mapping[str, object], folder: Path) -> Recipe:
    """A recipe of a base, commands, and what the keys of a task's ``build`` say of the repository."""
    from minisandbox.images.recipe import Recipe  # noqa: PLC0415 - reading task files must not load the sandbox

    rest = {name: value for name, value in table.items() if name not in _KEYS}
    inner = build_spec(rest, base=folder).recipe().recipe()
    workdir, user = _text(table, "workdir"), _text(table, "user")
    return Recipe(
        _base(_text(table, "base"), _text(table, "platform"), folder),
        (*_runs(table.get("step", [])), *inner.steps),
        inner.environment,
        PurePosixPath(workdir) if workdir else inner.workdir if inner.steps else None,
        user or None,
    )


def _base(text: str, platform: str, folder: Path) -> Base:
    from minisandbox.images.recipe import HostBase, OciBase, ScratchBase  # noqa: PLC0415 - see above

    if text in ("host", "scratch"):
        return HostBase() if text == "host" else ScratchBase()
    kind, colon, place = text.partition(":")
    if colon and kind in ("oci", "oci-archive", "docker-archive"):
        text = f"{kind}:{folder / place}"
    return OciBase(text, platform)


def _runs(rows: object) -> Iterator[Run]:
    if not isinstance(rows, list):
        raise InvalidValue("'step' is not a list of tables", hint="write [[step]] above each")
    for number, row in enumerate(rows, 1):
        try:
            yield _run(row)
        except InvalidValue as error:
            raise error.about(f"step {number}") from error


def _run(row: object) -> Run:
    from minisandbox.images.recipe import Run  # noqa: PLC0415 - see above

    if not isinstance(row, dict):
        raise InvalidValue("it is not a table", hint='write [[step]] and run = "..."')
    for name in row:
        if name not in _STEP_KEYS:
            raise InvalidValue(f"{name!r} is unknown", hint=f"known are {', '.join(_STEP_KEYS)}")
    command, variables = row.get("run"), row.get("environment", {})
    if isinstance(command, str):
        command = ["/bin/sh", "-c", command]
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise InvalidValue("'run' is neither a text nor a list of texts", hint='write run = "make"')
    if not isinstance(variables, dict):
        raise InvalidValue("'environment' is not a table", hint='write environment = {NAME = "value"}')
    workdir = _text(row, "workdir")
    return Run(
        tuple(command),
        tuple((name, _text(variables, name)) for name in variables),
        PurePosixPath(workdir) if workdir else None,
        _text(row, "user"),
        _text(row, "network") or "host",
    )


def _text(row: Mapping[str, object], name: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise InvalidValue(f"{name!r} is not a text", hint="put it in quotes")
    return value
