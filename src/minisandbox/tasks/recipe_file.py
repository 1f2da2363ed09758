"""PythonRecipe files: one image, described by the keys of a task's ``build``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.tasks.rows import build_spec

if TYPE_CHECKING:
    from minisandbox.images import PythonRecipe


def read_recipe(path: Path) -> PythonRecipe:
    """Read a recipe file: the keys of a task's ``build``, as TOML.

    Args:
        path: the file; relative paths in it are below its directory.

    Raises:
        InvalidValue: it cannot be read, or a key or value in it cannot be used.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return build_spec(table, base=path.absolute().parent).recipe()
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}", hint="give a recipe (.toml) or a task set") from error
    except ValueError as error:
        if isinstance(error, InvalidValue):
            raise error.about(str(path)) from error
        if isinstance(error, TaskFileError):
            what = error.what.replace("'build.", "'")
            raise InvalidValue(f"{path}: {what}", reason=error.reason, hint=error.hint) from error
        raise InvalidValue(f"{path} is not TOML", reason=str(error)) from error
