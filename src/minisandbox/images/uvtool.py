"""The uv program that MiniSandbox was installed with."""

from __future__ import annotations

from pathlib import Path

import uv

from minisandbox.errors import ProgramNotFound


def find_uv() -> Path:
    """Return the program's path, links resolved.

    Raises:
        ProgramNotFound: the package ``uv`` is there and its program is not.
    """
    try:
        return Path(uv.find_uv_bin()).resolve(strict=True)
    except OSError as error:
        raise ProgramNotFound(
            "there is no uv program",
            reason=f"the Python package uv was installed without it: {error}",
            hint="pip install --force-reinstall uv",
        ) from error
