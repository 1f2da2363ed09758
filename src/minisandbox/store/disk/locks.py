"""Locks between processes and threads: flock(2) on a file without other use."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.store.disk.faults import store_faults

LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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
    deadline = time.monotonic() + timeout
    with store_faults(f"lock {path.name}"):
        while (fd := open_locked(path, LOCK_FILE)) is None:
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"lock {path.name} is still held after {timeout:.0f} s",
                    reason="another process builds the same layer",
                    hint="wait for it to end; a lock ends with its process",
                )
            if on_wait is not None:
                on_wait()
            time.sleep(_POLL)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: a process that waits on this inode sees that the name moved on
        os.close(fd)


@contextmanager
def hold_flock(path: Path, flags: int, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock on a file or directory that stays, while the body runs; wait for it as long as it takes.

    Args:
        path: it.
        flags: :data:`LOCK_FILE` or :data:`DIRECTORY`.
        shared: whether others may hold it in the same way.

    Raises:
        OSError: the path cannot be opened.
    """
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def open_locked(path: Path, flags: int, lock: Callable[[int], bool] = try_flock) -> int | None:
    """Return a locked descriptor of a file or directory, for the caller to close; None if it is locked, or has gone.

    Args:
        path: it.
        flags: :data:`LOCK_FILE` or :data:`DIRECTORY`.
        lock: locks the descriptor; returns whether it could.

    Raises:
        OSError: the path cannot be opened.
    """
    fd = os.open(path, flags, 0o600)
    try:
        if lock(fd) and still_named(fd, path):
            return fd
    except BaseException:  # the descriptor must not leak, whatever ended it
        os.close(fd)
        raise
    os.close(fd)
    return None


def still_named(fd: int, path: Path) -> bool:
    """Return whether the locked inode still has that name: its last holder may have removed it."""
    try:
        named = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
