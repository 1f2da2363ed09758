"""The shell scripts that run inside build sandboxes."""

from __future__ import annotations

import shlex
from importlib import resources


def script(*names: str, **variables: str) -> str:
    """Return one script of several: variables, the common beginning, the given scripts, the common end.

    Args:
        names: files next to this one, without ``.sh``.
        variables: values that they read.
    """
    folder = resources.files(__name__)
    values = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    return values + "\n".join((folder / f"{name}.sh").read_text("utf-8") for name in ("common", *names, "finish"))
