"""Atomic writing of files and folders."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import InvalidValue


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces the target when the block succeeds, and is removed otherwise.

    Args:
        path: where it goes; its directory must exist. A file replaces what file is there, a folder only an empty one.

    Raises:
        InvalidValue: a folder with something in it is there already.
        OSError: the kernel refused; what was there before is still there.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield part
        if part.is_dir() and path.is_dir() and any(path.iterdir()):
            raise InvalidValue(f"{path} is there already", hint="name a new folder, or remove that one")
        _sync(part)
        part.replace(path)
    except BaseException:  # Ctrl-C included: nothing half-written stays
        _remove(part)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
