"""Reading what may be somebody else's: no link is followed, nothing is waited for, and nothing is read without end.

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

_CHUNK = 1 << 20
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # O_PATH: searching a directory is enough
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: the open of a pipe does not wait for a writer


def open_below(root: Path, name: str) -> IO[bytes]:
    """Open a regular file of a store for reading.

    Args:
        root: the store's directory, which may be reached through links.
        name: the file, relative to that; no directory on the way to it may be a link.

    Raises:
        StoreError: it is no regular file, or is reached through a link.
        OSError: it cannot be opened; FileNotFoundError where it is not there.
    """
    *folders, last = name.split("/")
    parent = open_folder(root, folders)
    try:
        return _opened(last, f"{root}/{name}", _FILE | os.O_NOFOLLOW, parent)
    finally:
        os.close(parent)


def read_below(root: Path, name: str, most: int) -> bytes:
    """Read a regular file of a store.

    Args:
        root: the store's directory.
        name: the file, relative to that.
        most: bytes that it may have.

    Raises:
        StoreError: it is no regular file, is reached through a link, or is longer.
        OSError: it cannot be read; FileNotFoundError where it is not there.
    """
    with open_below(root, name) as file:
        return _read(file, f"{root}/{name}", most)


def read_regular(path: Path, most: int, check: Callable[[Path], None] = lambda _: None) -> bytes:
    """Read a regular file that somebody named; links to it are followed.

    Args:
        path: the file.
        most: bytes that it may have.
        check: is called with where the opened file lies, all links followed, before it is read.

    Raises:
        StoreError: it is no regular file, or is longer.
        OSError: it cannot be read.
    """
    with _opened(os.fspath(path), str(path), _FILE, None) as file:
        check(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        return _read(file, str(path), most)


def open_folder(root: Path, folders: list[str]) -> int:
    """Return a descriptor (``O_PATH``) of a directory of a store, for the caller to close.

    Args:
        root: the store's directory, which may be reached through links.
        folders: the directories from there on, none of which may be a link.

    Raises:
        StoreError: one is a link, or no directory.
        OSError: one cannot be opened.
    """
    found = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for number, folder in enumerate(folders, 1):
            where = "/".join((str(root), *folders[:number]))
            if folder == ".." or "\0" in folder:
                raise _unexpected(where, "it is not below the store")
            below = _folder(folder, where, found)
            os.close(found)
            found = below
    except BaseException:  # the descriptor must not leak, whatever ended it
        os.close(found)
        raise
    return found


def _folder(name: str, where: str, parent: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _unexpected(where, "it is a link, or no directory") from error
        raise _named(error, where) from error


def _opened(name: str, where: str, flags: int, parent: int | None) -> IO[bytes]:
    if "\0" in name:
        raise _unexpected(where, "no file has such a name")
    try:
        fd = os.open(name, flags, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # open(2): ENXIO for a socket
            raise _unexpected(where, "it is a link or a socket, not a file") from error
        raise _named(error, where) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unexpected(where, "it is a directory, a pipe or a device, not a file")
        return os.fdopen(fd, "rb")
    except BaseException:  # the descriptor must not leak, whatever ended it
        os.close(fd)
        raise


def _read(file: IO[bytes], where: str, most: int) -> bytes:
    size, data = os.fstat(file.fileno()).st_size, bytearray()
    while size <= most and (chunk := file.read(min(_CHUNK, most + 1 - len(data)))):
        data += chunk
    if max(size, len(data)) > most:  # it may have grown, and files of /proc have no size
        raise StoreError(
            f"{where} is too large",
            reason=f"it has more than {most} bytes",
            hint="nothing that MiniSandbox writes there is as large: remove it",
        )
    return bytes(data)


def _named(error: OSError, where: str) -> OSError:
    """The same error with the whole path: opening relative to a directory names the last part only."""
    return OSError(error.errno, error.strerror, where)  # its class comes from the number


def _unexpected(where: str, reason: str) -> StoreError:
    return StoreError(
        f"{where} is not a file that can be read",
        reason=reason,
        hint="see who put it there; MiniSandbox makes files and directories only",
    )
