"""Staging directories: each is locked; the next process removes those of dead owners."""

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
    """Make a private directory, held by a lock while the body runs, removed afterwards whatever happened.

    Args:
        root: the store's directory.
        label: what it is for; part of its name.

    Raises:
        OSError: the directory cannot be created or removed.
    """
    path = root / "staging" / f"{label[:40]}.{secrets.token_hex(6)}"
    with _gate(root):  # between mkdir and flock no process may take it for a leftover
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
    """Remove the staging directories of dead processes; locked ones are in use.

    Returns:
        How many directories were removed.
    """
    names = [name for name in os.listdir(root / "staging") if not name.startswith(".")]
    return sum(_reclaim_one(root, root / "staging" / name) for name in names)


def _reclaim_one(root: Path, path: Path) -> bool:
    fd = None
    with _gate(root), suppress(OSError):  # gone, or no directory: not a maker's
        fd = open_locked(path, DIRECTORY)
    if fd is None:
        return False
    try:
        # What cannot be removed (foreign owner, mount) must not keep the store from opening.
        with suppress(OSError):
            remove_tree(path)
            return True
        return False
    finally:
        os.close(fd)


def _gate(root: Path) -> AbstractContextManager[None]:
    return hold_flock(root / "staging/.gate", LOCK_FILE)  # held for microseconds, never across a wait
