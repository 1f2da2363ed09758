"""The uv program that MiniSandbox was installed with."""

from __future__ import annotations

import threading
from pathlib import Path

import uv

from minisandbox.errors import ProgramNotFound

_FINDING = threading.Lock()
"""It asks sysconfig, which answers a second thread with half of what it is about to know."""


def find_uv() -> Path:
    """Return the program's path, links resolved.

    Raises:
        ProgramNotFound: the package ``uv`` is there and its program is not.
    """
    try:
        with _FINDING:
            return Path(uv.find_uv_bin()).resolve(strict=True)
    except OSError as error:
        raise ProgramNotFound(
            "there is no uv program",
            reason=f"the Python package uv was installed without it: {error}",
            hint="pip install --force-reinstall uv",
        ) from error
