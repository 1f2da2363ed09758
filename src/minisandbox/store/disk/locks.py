"""Lock files and directories with flock(2) to exclude other processes and threads."""

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
    """Try to take an exclusive lock on an open file without waiting; return whether this succeeded."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, *, timeout: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` while the body runs.

    The kernel releases the lock if the holder is killed.

    Args:
        path: the lock file, created if missing and removed afterwards.
        timeout: seconds to wait while another process holds the lock.
        on_wait: called repeatedly during the wait.

    Raises:
        StoreError: another process still holds the lock after ``timeout``, or a system call failed.
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
        path.unlink(missing_ok=True)  # before the unlock, so that a waiting process notices that the file was replaced
        os.close(fd)


@contextmanager
def hold_flock(path: Path, flags: int, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock on a permanent file or directory while the body runs; wait for the lock without a limit.

    Args:
        path: the file or directory.
        flags: :data:`LOCK_FILE` or :data:`DIRECTORY`.
        shared: take a shared lock instead of an exclusive one.

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
    """Lock a file or directory; return a descriptor, which the caller closes, or None if it is locked or was removed.

    Args:
        path: the file or directory.
        flags: :data:`LOCK_FILE` or :data:`DIRECTORY`.
        lock: locks the descriptor, and returns whether that succeeded.

    Raises:
        OSError: the path cannot be opened.
    """
    fd = os.open(path, flags, 0o600)
    try:
        if lock(fd) and still_named(fd, path):
            return fd
    except BaseException:  # also on Ctrl-C, do not leak the descriptor
        os.close(fd)
        raise
    os.close(fd)
    return None


def still_named(fd: int, path: Path) -> bool:
    """Return whether the locked inode still has the name ``path``; the previous holder may have removed it."""
    try:
        path_status = os.lstat(path)
    except FileNotFoundError:
        return False
    fd_status = os.fstat(fd)
    return (fd_status.st_dev, fd_status.st_ino) == (path_status.st_dev, path_status.st_ino)
