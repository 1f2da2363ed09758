"""Create locked staging directories for unfinished files, and remove the directories of dead processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from minisandbox.store.disk.locks import DIRECTORY, LOCK_FILE, hold_flock, open_locked
from minisandbox.store.disk.trees import remove_tree


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
    with _gate(root):  # so that no process removes the directory as a leftover between mkdir and flock
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
    """Remove the staging directories of dead processes, which are unlocked.

    Returns:
        How many directories were removed.
    """
    names = [name for name in os.listdir(root / "staging") if not name.startswith(".")]
    return sum(_reclaim_one(root, root / "staging" / name) for name in names)


def _reclaim_one(root: Path, path: Path) -> bool:
    fd = None
    with _gate(root), suppress(OSError):  # the path was removed meanwhile, or is not a directory
        fd = open_locked(path, DIRECTORY)
    if fd is None:
        return False
    try:
        # The store must open even if a leftover cannot be removed (another owner, a mount).
        with suppress(OSError):
            remove_tree(path)
            return True
        return False
    finally:
        os.close(fd)


def _gate(root: Path) -> AbstractContextManager[None]:
    return hold_flock(root / "staging/.gate", LOCK_FILE)  # callers hold this lock for microseconds only
