"""Read recipe files, which describe one image with the keys of a task's ``build``, or with steps on top of a base."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.spec import Base, Buildable, HostBase, OciBase, Recipe, Run, ScratchBase, split_local
from minisandbox.tasks.fields import Fields
from minisandbox.tasks.rows import build_spec

_KEYS = ("base", "platform", "workdir", "user", "step")
_STEP_KEYS = ("run", "environment", "workdir", "user", "network")


def read_recipe(path: Path) -> Buildable:
    """Read a recipe file: TOML with the keys of a task's ``build``; with the key ``base``, also steps on top of a base.

    Args:
        path: the file; paths in it are relative to its directory.

    Raises:
        InvalidValue: the file cannot be read, or a key or value is invalid.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        folder = path.absolute().parent
        if "base" in table:
            return _over_base(table, folder)
        build = build_spec(table, base=folder)
        build.recipe()  # raises InvalidValue if a field is invalid
        return build
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}", hint="give a recipe (.toml) or a task set") from error
    except ValueError as error:
        if isinstance(error, InvalidValue):
            raise error.about(str(path)) from error
        if isinstance(error, TaskFileError):
            sentence = error.what.replace("'build.", "'")
            raise InvalidValue(f"{path}: {sentence}", reason=error.reason, hint=error.hint) from error
        raise InvalidValue(f"{path} is not TOML", reason=str(error)) from error


def _over_base(table: Mapping[str, object], folder: Path) -> Recipe:
    """Return the recipe of a file with ``base``: the base, its commands, and the keys of a task's ``build``."""
    fields = Fields(table)
    build_keys = {name: value for name, value in table.items() if name not in _KEYS}
    build_recipe = build_spec(build_keys, base=folder).recipe()
    workdir, user = fields.text("workdir", default=""), fields.text("user", default="")
    return Recipe(
        _base(fields.text("base"), fields.text("platform", default=""), folder),
        (*_runs(fields), *build_recipe.steps),
        build_recipe.environment,
        PurePosixPath(workdir) if workdir else build_recipe.workdir if build_recipe.steps else None,
        user or None,
    )


def _base(reference: str, platform: str, folder: Path) -> Base:
    if reference in ("host", "scratch"):
        return HostBase() if reference == "host" else ScratchBase()
    local = split_local(reference)
    return OciBase(reference if local is None else f"{local[0]}:{folder / local[1]}", platform)


def _runs(fields: Fields) -> Iterator[Run]:
    rows = fields.row.get("step", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise fields.error("step", "is not a list of tables", hint='write [[step]] above each, and run = "..."')
    for step_number, row in enumerate(rows, 1):
        step = Fields(row, f"step {step_number}: ", keys=_STEP_KEYS)
        command = row.get("run")
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else step.texts("run")
        workdir = step.text("workdir", default="")
        try:
            yield Run(
                argv,
                step.variables("environment") if "environment" in row else (),
                PurePosixPath(workdir) if workdir else None,
                step.text("user", default=""),
                step.text("network", default="host"),
            )
        except InvalidValue as error:
            raise error.about(f"step {step_number}") from error
