"""Read files that another user may own: follow no link, wait for no writer, bound the size.

A store can belong to another user, who may put anything in the place of a file: a link, a pipe, a file without end.
Our own store is read in the same way; a damaged one of ours is found so too.
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
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: the open of a pipe does not wait for a writer
_LINKS = frozenset({errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ENOTDIR})
"""openat2(2): a link, a way out, a socket, a file in the place of a directory."""


def open_below(root: Path, name: str) -> IO[bytes]:
    """Open a regular file of a store for reading.

    Args:
        root: the store's directory, which may be reached through links.
        name: the file, relative to that; nothing on the way to it may be a link, or lead out.

    Raises:
        StoreError: the name is no regular file, or is reached through a link.
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
        name: the file, relative to that.
        limit: bytes that it may have.

    Raises:
        StoreError: the name is no regular file, is reached through a link, or the file is larger.
        OSError: the file cannot be read; FileNotFoundError if it is missing.
    """
    with open_below(root, name) as file:
        return _read(file, f"{root}/{name}", limit)


def read_regular(path: Path, limit: int, check: Callable[[Path], None] = lambda _: None) -> bytes:
    """Read a regular file that the user named; links to it are followed.

    Args:
        path: the file.
        limit: bytes that it may have.
        check: is called with where the opened file lies, all links followed, before it is read.

    Raises:
        StoreError: the path is no regular file, or the file is larger.
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
        raise OSError(error.errno, error.strerror, where) from error  # with the whole path
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unexpected(where, "it is a directory, a pipe or a device, not a file")
        return os.fdopen(fd, "rb")
    except BaseException:  # the descriptor must not leak, whatever ended it
        os.close(fd)
        raise


def _read(file: IO[bytes], where: str, limit: int) -> bytes:
    size, data = os.fstat(file.fileno()).st_size, bytearray()
    while size <= limit and (chunk := file.read(min(_CHUNK, limit + 1 - len(data)))):
        data += chunk
    if max(size, len(data)) > limit:  # the file may have grown, and files of /proc have size 0
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
