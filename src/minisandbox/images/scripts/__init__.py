"""The shell scripts that run inside build sandboxes."""

from __future__ import annotations

import shlex
from importlib import resources


def script(*names: str, **variables: str) -> str:
    """Return a shell script: variable assignments, ``common.sh``, the named scripts and ``finish.sh``, in this order.

    Args:
        names: names of scripts in this directory, without ``.sh``.
        variables: variables that the scripts read.
    """
    folder = resources.files(__name__)
    values = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    return values + "\n".join((folder / f"{name}.sh").read_text("utf-8") for name in ("common", *names, "finish"))
