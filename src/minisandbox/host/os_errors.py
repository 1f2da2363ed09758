"""Convert OSErrors about directories for records, sockets and locks to a HostError with a hint."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import HostError, MiniSandboxError

OTHER_RUNTIME = "set MINISANDBOX_RUNTIME to a private directory of this user elsewhere"
_TROUBLES = {
    errno.ENOSPC: ("its file system has no room left, for bytes or for files", "free some space there (df, df -i)"),
    errno.EDQUOT: ("this user's quota there is used up", "free some space there (quota)"),
    errno.EROFS: ("its file system is mounted read-only", "mount it writable"),
    errno.EACCES: ("the modes of the directories there keep this user out", "give this user a directory there"),
    errno.EPERM: ("the kernel lets this user make nothing there", "give this user a directory there"),
    errno.ENOTDIR: ("a part of this path is no directory", "remove what is in the way"),
    errno.EEXIST: ("there is something else of that name", "remove what is in the way"),
    errno.ENAMETOOLONG: ("this path is too long", "choose a shorter one"),
}
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE)


@contextmanager
def runtime_os_errors(action: str, path: Path, other_directory: str = OTHER_RUNTIME) -> Iterator[None]:
    """Convert an ``OSError`` of the body to a :class:`HostError` that names the failed action.

    A :class:`.MiniSandboxError` is passed on unchanged.

    Args:
        action: the failed action and its object, such as ``"record sandbox box-1"``.
        path: directory in which it failed.
        other_directory: hint for choosing another directory; empty if there is no choice.

    Raises:
        HostError: the kernel refused.
    """
    try:
        yield
    except MiniSandboxError:
        raise
    except OSError as error:
        raise runtime_os_error(action, path, error, other_directory) from error


def runtime_os_error(action: str, path: Path, error: OSError, other_directory: str = OTHER_RUNTIME) -> HostError:
    """Return the error that :func:`runtime_os_errors` raises for an OSError."""
    message = error.strerror or str(error)
    if error.errno in _OWN_LIMITS:
        hint = "close sandboxes that are not needed, or raise the limit on open files (ulimit -n)"
        return HostError(f"cannot {action} in {path}: {message}", reason="no descriptor is left", hint=hint)
    reason, hint = _TROUBLES.get(error.errno or 0, (None, "see what is at that path"))
    return HostError(
        f"cannot {action} in {path}: {message}",
        reason=reason,
        hint=f"{hint}, or {other_directory}" if other_directory else hint,
    )
