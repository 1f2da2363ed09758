"""Read files that another user may own: never follow a link, wait for a writer, or exceed a size limit.

A store can belong to another user, who may replace a file by a link, a pipe or an endless file. The user's own store
is read with the same checks, which also detect damage.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

from minisandbox.errors import StoreError
from minisandbox.launch.kernel import syscalls

_CHUNK = 1 << 20
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: do not wait for the writer of a pipe
_LINKS = frozenset({errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ENOTDIR})
"""Errors of openat2(2) for a link, a path that leaves the directory, a socket, and a file instead of a directory."""


def open_below(root: Path, name: str) -> IO[bytes]:
    """Open a regular file of a store for reading.

    Args:
        root: the store's directory, whose own path may contain links.
        name: path of the file, relative to ``root``; it may not contain links or lead out of ``root``.

    Raises:
        StoreError: the name is not a regular file, or its path contains a link.
        OSError: the file cannot be opened; FileNotFoundError if it is missing.
    """
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _opened(f"{root}/{name}", lambda: syscalls.openat2(top, name, _FILE, syscalls.RESOLVE_INSIDE))
    finally:
        os.close(top)


def read_below(root: Path, name: str, limit: int) -> bytes:
    """Read a regular file of a store.

    Args:
        root: the store's directory.
        name: path of the file, relative to ``root``.
        limit: maximum size in bytes.

    Raises:
        StoreError: the name is not a regular file, its path contains a link, or the file is larger than ``limit``.
        OSError: the file cannot be read; FileNotFoundError if it is missing.
    """
    with open_below(root, name) as file:
        return _read(file, f"{root}/{name}", limit)


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
    with _opened(str(path), lambda: os.open(path, _FILE)) as file:
        check(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        return _read(file, str(path), limit)


def _opened(where: str, open_file: Callable[[], int]) -> IO[bytes]:
    if "\0" in where:
        raise _unexpected(where, "no file has such a name")
    try:
        fd = open_file()
    except OSError as error:
        if error.errno in _LINKS:
            raise _unexpected(where, "it is a link or a socket, or reached through a link") from error
        raise OSError(error.errno, error.strerror, where) from error  # the error of openat2 has no absolute path
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unexpected(where, "it is a directory, a pipe or a device, not a file")
        return os.fdopen(fd, "rb")
    except BaseException:  # Ctrl-C included: do not leak the descriptor
        os.close(fd)
        raise


def _read(file: IO[bytes], where: str, limit: int) -> bytes:
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
