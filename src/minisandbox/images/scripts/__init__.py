"""Compose the shell scripts that run in build sandboxes; define their paths there and the order of the build steps."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import PurePosixPath

BUILD = PurePosixPath("/tmp/build")  # noqa: S108 - in the sandbox, removed with it
IMAGE = PurePosixPath("/image")
"""The path at which the image's root is mounted for MiniSandbox's own tools."""
MOUNTS = PurePosixPath("/run/minisandbox")

RANKS = ("base", "system", "python", "requirements", "source", "install", "by_hand", "tests", "repository", "task")
"""The names of the steps, bottom first. A file's mtime depends on the rank of the step that writes it."""


def script(*names: str, **variables: str) -> str:
    """Return a shell script: variable assignments, ``common.sh``, the named scripts and ``finish.sh``, in this order.

    Args:
        names: names of scripts in this directory, without ``.sh``.
        variables: variables that the scripts read.
    """
    folder = resources.files(__name__)
    values = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    return values + "\n".join((folder / f"{name}.sh").read_text("utf-8") for name in ("common", *names, "finish"))
