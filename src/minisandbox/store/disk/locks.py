"""Locks between processes and threads: flock(2) on a file that belongs to nobody."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.store.disk.faults import store_faults

_POLL = 0.05


def try_flock(fd: int) -> bool:
    """Take an exclusive lock on an open file if no process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, *, timeout: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock that ``path`` names while the body runs.

    The kernel drops it when its holder dies, however it dies.

    Args:
        path: the lock file; it is made if it is not there, and removed afterwards.
        timeout: seconds to wait for another holder.
        on_wait: called again and again while there is another holder.

    Raises:
        StoreError: another process still holds the lock after ``timeout``, or the kernel refused.
        DiskFull: there is no space for the lock file.
    """
    with store_faults(f"lock {path.name}"):
        fd = _acquire(path, timeout, on_wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: a process that waits on this inode sees that the name moved on
        os.close(fd)


def _acquire(path: Path, timeout: float, on_wait: Callable[[], None] | None) -> int:
    deadline = time.monotonic() + timeout
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        held = False
        try:
            held = try_flock(fd) and still_named(fd, path)
        finally:
            if not held:
                os.close(fd)
        if held:
            return fd
        if time.monotonic() >= deadline:
            raise StoreError(
                f"lock {path.name} is still held after {timeout:.0f} s",
                reason="another process builds the same layer",
                hint="wait for it to end; a lock ends with its process",
            )
        if on_wait is not None:
            on_wait()
        time.sleep(_POLL)


def still_named(fd: int, path: Path) -> bool:
    """Whether the locked inode is still the one of that name: its last holder may have removed it."""
    try:
        named = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
