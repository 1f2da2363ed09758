"""Write files and folders atomically."""

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
    """Yield a temporary path; rename it to the target if the block succeeds, and remove it otherwise.

    Args:
        path: the target; its parent directory must exist. A file replaces an existing file, a folder only an empty one.

    Raises:
        InvalidValue: the target is a folder that is not empty.
        OSError: writing failed; the previous target is unchanged.
    """
    temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield temporary_path
        if temporary_path.is_dir() and path.is_dir() and any(path.iterdir()):
            raise InvalidValue(f"{path} is there already", hint="name a new folder, or remove that one")
        _sync(temporary_path)
        temporary_path.replace(path)
    except BaseException:  # also on Ctrl-C, leave no incomplete file behind
        _remove(temporary_path)
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
