"""Create locked staging directories for unfinished files, and remove the directories of dead processes."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from minisandbox.store.disk.locks import DIRECTORY, LOCK_FILE, hold_flock, open_locked
from minisandbox.store.disk.trees import remove_tree

_TORN = re.compile(r"\..+\.[0-9a-f]{12}")
_TORN_AGE = 3600.0


@contextmanager
def staging_directory(root: Path, label: str) -> Iterator[Path]:
    """Create a private directory, lock it while the body runs, and remove it afterwards, even after an error.

    Args:
        root: the store's directory.
        label: purpose of the directory, which becomes part of its name.

    Raises:
        OSError: the directory cannot be created or removed.
    """
    path = root / "staging" / f"{label[:40]}.{secrets.token_hex(6)}"
    with _gate(root):  # otherwise reclaim() could remove the directory between mkdir and flock
        path.mkdir(mode=0o700)
        fd = open_locked(path, DIRECTORY)
    assert fd is not None
    try:
        yield path
    finally:
        try:
            remove_tree(path)
        finally:
            os.close(fd)


def reclaim(root: Path) -> int:
    """Remove the staging directories of dead processes, recognized by a free lock.

    Returns:
        The number of removed directories.
    """
    names = [name for name in os.listdir(root / "staging") if not name.startswith(".")]
    return sum(_reclaim_one(root, root / "staging" / name) for name in names)


def remove_torn(root: Path) -> int:
    """Remove the half-written files of killed processes (:func:`.write_atomic`); return their number."""
    torn_count = 0
    for folder in (root, root / "images", root / "failed", root / "logs", root / "blobs"):
        for path in folder.glob(".*"):
            with suppress(OSError):  # the file was renamed or removed meanwhile
                if _TORN.fullmatch(path.name) and time.time() - path.stat().st_mtime > _TORN_AGE:
                    path.unlink()
                    torn_count += 1
    return torn_count


def _reclaim_one(root: Path, path: Path) -> bool:
    fd = None
    with _gate(root), suppress(OSError):  # the path was removed meanwhile, or is not a directory
        fd = open_locked(path, DIRECTORY)
    if fd is None:
        return False
    try:
        # Ignore a leftover that cannot be removed, for example because of a mount, so that the store can be opened.
        with suppress(OSError):
            remove_tree(path)
            return True
        return False
    finally:
        os.close(fd)


def _gate(root: Path) -> AbstractContextManager[None]:
    # This never blocks for long, because callers hold the lock for microseconds.
    return hold_flock(root / "staging/.gate", LOCK_FILE)
