"""Convert OSErrors of store operations to :class:`.StoreError`, and detect a full disk."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import DiskFull, MiniSandboxError, StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or quota."""

_LONGEST = 600
_HINTS = {
    errno.EACCES: "check who owns the store, or set MINISANDBOX_STORE to a directory of your own",
    errno.EPERM: "check who owns the store and for immutable files (lsattr)",
    errno.EROFS: "set MINISANDBOX_STORE to a directory on a writable file system",
    errno.EXDEV: "the whole store must lie on one file system",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
_FEW_FILES = 100


@contextmanager
def store_faults(action: str) -> Iterator[None]:
    """Convert an ``OSError`` of the body to a :class:`StoreError` that names the failed action.

    A :class:`MiniSandboxError` passes unchanged.

    Args:
        action: the action and its object, for example ``"publish layer ab12"``.

    Raises:
        DiskFull: the disk or a quota is full.
        StoreError: the body raised another OSError.
    """
    try:
        yield
    except MiniSandboxError:  # some are also OSErrors, but already have a complete message
        raise
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(action, error) from error
        hint = _HINTS.get(error.errno or 0)
        raise StoreError(f"cannot {action}", reason=_message(error), hint=hint) from error


def disk_full(action: str, error: OSError | None = None) -> DiskFull:
    """Return the error for a full disk.

    Args:
        action: the failed action and its object.
        error: the OSError, if a system call failed.
    """
    fault = DiskFull(
        f"cannot {action}: the disk is full",
        reason=_message(error) if error else "no space left on the store's file system",
        hint="free some space, or set MINISANDBOX_STORE to a larger disk; finished layers are kept",
    )
    fault.errno = error.errno if error else errno.ENOSPC
    return fault


def _message(error: OSError) -> str:
    """Return the message of an OSError; cut out the middle of a very long message."""
    message = str(error)
    return message if len(message) <= _LONGEST else f"{message[: _LONGEST // 2]}...{message[-_LONGEST // 2 :]}"


def is_full(directory: Path, minimum: int) -> bool:
    """Return whether a directory's file system or quota has too little space or too few inodes left.

    Args:
        directory: a private directory, in which a test file is created and removed.
        minimum: bytes that must be free.

    Raises:
        OSError: the file system's status cannot be read.
    """
    status = os.statvfs(directory)
    if status.f_bavail * status.f_frsize < minimum or (status.f_files > 0 and status.f_favail < _FEW_FILES):
        return True
    return not _can_allocate(directory, minimum)


def _can_allocate(directory: Path, size: int) -> bool:
    """Return whether a file of this size can be allocated; unlike statvfs(3), fallocate(2) respects quotas."""
    path = directory / f"room.{secrets.token_hex(6)}"
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            os.fsync(file.fileno())  # network file systems report a full disk only here
    except OSError as error:
        # Other errors, for example EFBIG or EOPNOTSUPP, do not mean a full disk.
        return error.errno not in FULL
    finally:
        path.unlink(missing_ok=True)
    return True
