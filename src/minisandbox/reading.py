"""Read regular files up to a size limit; reject other files, such as a pipe without a writer, instead of blocking."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

from minisandbox.errors import StoreError

_CHUNK = 1 << 20
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a file; with O_NONBLOCK, opening does not wait for the writer of a pipe."""
_LINKS = frozenset({errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ENOTDIR})
"""Errors of openat2(2) for a symbolic link, a path that leaves the directory, a socket, and a parent that is a file."""


def read_regular(path: Path, limit: int, check: Callable[[Path], None] = lambda _: None) -> bytes:
    """Read a regular file that the user named; links are followed.

    Args:
        path: the file.
        limit: maximum size in bytes.
        check: called with the resolved path of the opened file before the file is read.

    Raises:
        StoreError: the path is not a regular file, or the file is larger than ``limit``.
        OSError: the file cannot be read.
    """
    with open_regular(str(path), lambda: os.open(path, FLAGS)) as file:
        check(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        return read_limited(file, str(path), limit)


def open_regular(where: str, open_file: Callable[[], int]) -> IO[bytes]:
    """Open a regular file for reading.

    Args:
        where: the path in errors.
        open_file: opens the file and returns its descriptor; pass :data:`FLAGS` to open(2).

    Raises:
        StoreError: the path is not a regular file, or contains a link that ``open_file`` refuses.
        OSError: the file cannot be opened.
    """
    if "\0" in where:
        raise _unexpected(where, "no file has such a name")
    try:
        fd = open_file()
    except OSError as error:
        if error.errno in _LINKS:
            raise _unexpected(where, "it is a link or a socket, or reached through a link") from error
        raise OSError(error.errno, error.strerror, where) from error  # openat2 reports no absolute path
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unexpected(where, "it is a directory, a pipe or a device, not a file")
        return os.fdopen(fd, "rb")
    except BaseException:  # also on Ctrl-C, do not leak the descriptor
        os.close(fd)
        raise


def read_limited(file: IO[bytes], where: str, limit: int) -> bytes:
    """Read a file; raise StoreError if it is larger than ``limit`` bytes."""
    size, data = os.fstat(file.fileno()).st_size, bytearray()
    while size <= limit and (chunk := file.read(min(_CHUNK, limit + 1 - len(data)))):
        data += chunk
    if max(size, len(data)) > limit:  # the file may have grown, and files in /proc report size 0
        raise StoreError(
            f"{where} is too large",
            reason=f"it has more than {limit} bytes",
            hint="nothing that MiniSandbox writes there is as large: remove it",
        )
    return bytes(data)


def _unexpected(where: str, reason: str) -> StoreError:
    return StoreError(
        f"{where} is not a file that can be read",
        reason=reason,
        hint="see who put it there; MiniSandbox makes files and directories only",
    )
