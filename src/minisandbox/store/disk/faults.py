"""Translate the OSErrors of the store into its own errors."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import DiskFull, MiniSandboxError, StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the kernel says if a disk or a quota is full."""

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
def store_faults(what: str) -> Iterator[None]:
    """Turn an ``OSError`` of the body into a :class:`StoreError` that says what failed; our own errors pass.

    Args:
        what: the failed action and its object, such as ``"publish layer ab12"``.

    Raises:
        DiskFull: the disk or a quota is full.
        StoreError: any other refusal.
    """
    try:
        yield
    except MiniSandboxError:  # some of our own errors are OSErrors, too; their message is complete
        raise
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(what, error) from error
        hint = _HINTS.get(error.errno or 0)
        raise StoreError(f"cannot {what}", reason=_told(error), hint=hint) from error


def disk_full(what: str, error: OSError | None = None) -> DiskFull:
    """Return the error for a full disk.

    Args:
        what: the failed action and its object.
        error: what the kernel said.
    """
    fault = DiskFull(
        f"cannot {what}: the disk is full",
        reason=_told(error) if error else "no space left on the store's file system",
        hint="free some space, or set MINISANDBOX_STORE to a larger disk; finished layers are kept",
    )
    fault.errno = error.errno if error else errno.ENOSPC
    return fault


def _told(error: OSError) -> str:
    """Return the kernel's message; the middle of a very long path is cut out."""
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def is_full(directory: Path, minimum: int) -> bool:
    """Return whether the file system of a directory, or a quota there, is as good as full.

    Args:
        directory: a private directory; a file is made in it and removed again.
        minimum: bytes below which it counts as full.

    Raises:
        OSError: the directory cannot be looked at.
    """
    info = os.statvfs(directory)
    if info.f_bavail * info.f_frsize < minimum or (info.f_files > 0 and info.f_favail < _FEW_FILES):
        return True
    return not _takes(directory, minimum)


def _takes(directory: Path, size: int) -> bool:
    """Return whether a file of that size can be allocated: fallocate(2) obeys quotas, which statvfs(3) hides."""
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
