"""Whether there is room on a disk, for somebody who has just failed there and may not have said why."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from minisandbox.store.disk.faults import FULL

_FEW_FILES = 100


def is_full(directory: Path, least: int) -> bool:
    """Whether the file system of a directory, or a quota there, is as good as full.

    Args:
        directory: a private directory; a file is made in it and removed again.
        least: bytes below which it counts as full.

    Raises:
        OSError: the directory cannot be looked at.
    """
    info = os.statvfs(directory)
    if info.f_bavail * info.f_frsize < least or (info.f_files > 0 and info.f_favail < _FEW_FILES):
        return True
    return not _takes(directory, least)


def _takes(directory: Path, size: int) -> bool:
    """Whether a file of that size can be had: statvfs(3) knows of no user's quota, and fallocate(2) meets it."""
    path = directory / f"room.{secrets.token_hex(6)}"
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            os.fsync(file.fileno())  # a server says it only now
    except OSError as error:  # any other says nothing about room: a limit on files' sizes, a file system without it
        return error.errno not in FULL
    finally:
        path.unlink(missing_ok=True)
    return True
