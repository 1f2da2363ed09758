"""The file verbs and ``usage`` as the controller sees them, without any socket: operations that yield calls.

An operation is a generator. Its driver carries out each :class:`.wire.Call` that it yields, resumes it with
``send(None)`` once the peer has answered or hung up, and takes its return value. Whatever goes wrong in between, it
must be closed (``operation.close()``): what a copy had begun on the host is then removed. Every verb raises

* :class:`.InvalidValue` before the first call, where an argument cannot be used;
* :class:`.FileAccessError` where the kernel refused inside;
* :class:`.SandboxGone` where the worker was killed, or answered what makes no sense.

Uploads and downloads read and write host files inside ``Call.outgoing()`` and ``Call.feed()``, at most 1 MiB at a time.
"""

from __future__ import annotations

import errno
import os
import stat as _stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.launch.jobs import trees
from minisandbox.sandbox.protocol.file_calls import (
    DoneCall,
    DownloadCall,
    EntriesCall,
    ReadCall,
    UploadCall,
    UsageCall,
    WriteCall,
    checked_path,
    request,
)
from minisandbox.sandbox.protocol.host_trees import MOST_ENTRIES, Download, Upload
from minisandbox.sandbox.protocol.wire import Operation
from minisandbox.types import FileInfo, SandboxUsage, Transfer

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def read(path: str | PurePosixPath, *, cwd: str, limit: int | None, sink: BinaryIO) -> Operation[int]:
    """Read a regular file into a stream, holes as zeros.

    Args:
        path: path inside; relative ones are below ``cwd``; links are followed, inside.
        cwd: absolute directory inside.
        limit: most bytes to take, or None.
        sink: where the bytes go.

    Returns:
        How many bytes.

    Raises:
        FileAccessError: there is no such file, it is not a regular one, or it is larger than the limit.
    """
    call = ReadCall(path, cwd=cwd, limit=limit, sink=sink)
    yield call
    return call.result()


def write(path: str | PurePosixPath, *, cwd: str, mode: int | None, source: Iterable[bytes]) -> Operation[int]:
    """Write a regular file from a stream, made with its missing parent directories.

    Args:
        path: path inside; links are followed, inside.
        cwd: absolute directory inside.
        mode: permission bits, or None to leave them (0644 for a new file).
        source: pieces of the content, of any size.

    Returns:
        How many bytes.

    Raises:
        FileAccessError: the path cannot be written, or the sandbox's disk limit is reached.
    """
    call = WriteCall(path, cwd=cwd, mode=mode, source=source)
    yield call
    return call.result()


def list_directory(path: str | PurePosixPath, *, cwd: str) -> Operation[tuple[FileInfo, ...]]:
    """Return a directory's entries, sorted by the bytes of their names; not recursive.

    Raises:
        FileAccessError: there is no such directory, it lies in /proc, it has more than a million entries, or
            their names and targets are too long together.
    """
    call = EntriesCall("list", path, cwd, max_entries=MOST_ENTRIES)
    yield call
    return tuple(sorted(call.result(), key=lambda info: info.path.name.encode("utf-8", "surrogateescape")))


def stat(path: str | PurePosixPath, *, cwd: str, follow: bool = True) -> Operation[FileInfo]:
    """Return a path's status, as :func:`os.stat` (``follow``) or :func:`os.lstat`.

    Raises:
        FileAccessError: there is no such file, or it is a link of /proc.
    """
    call = EntriesCall("stat", path, cwd, max_entries=1, follow=follow)
    yield call
    return call.result()[0]


def exists(path: str | PurePosixPath, *, cwd: str) -> Operation[bool]:
    """Return whether a path exists, links followed: a dangling link does not exist."""
    try:
        yield from stat(path, cwd=cwd)
    except FileAccessError as error:
        if error.errno not in _ABSENT:
            raise
        return False
    return True


def make_directory(
    path: str | PurePosixPath, *, cwd: str, mode: int = 0o755, parents: bool = True, exist_ok: bool = True
) -> Operation[None]:
    """Make a directory, with exactly this mode; one that exists already is left as it is.

    Args:
        path: path inside.
        cwd: absolute directory inside.
        mode: permission bits.
        parents: make missing parents too, with mode 0755.
        exist_ok: a directory (or a link to one) that exists already is fine.

    Raises:
        FileAccessError: the path exists, a parent is missing, or the directory cannot be created.
    """
    call = DoneCall(request("mkdir", path, cwd, mode=mode, parents=parents, exist_ok=exist_ok))
    yield call
    call.result()


def remove(
    path: str | PurePosixPath, *, cwd: str, recursive: bool = False, missing_ok: bool = False
) -> Operation[None]:
    """Remove a file, a link (never what it points to) or a directory.

    Args:
        path: path inside.
        cwd: absolute directory inside.
        recursive: a directory goes with all that is below it; links in it are removed and not followed.
        missing_ok: nothing to remove is fine.

    Raises:
        FileAccessError: there is no such file, the directory is not empty, or it cannot be removed.
    """
    call = DoneCall(request("remove", path, cwd, recursive=recursive, missing_ok=missing_ok))
    yield call
    call.result()


def move(source: str | PurePosixPath, target: str | PurePosixPath, *, cwd: str) -> Operation[None]:
    """Rename, as rename(2): a file or an empty directory at the target is replaced; links themselves are moved.

    Missing parents of the target are made. The kernel cannot rename to another mount, and overlayfs cannot rename a
    directory of the image. Then the tree is copied next to the target, renamed into place, and removed at its source.
    Owners, modes, times and holes are kept; hard links become files of their own.

    Raises:
        FileAccessError: there is no such source, the target is a directory with something in it, or lies below the
            source, or the disk limit is reached.
    """
    call = DoneCall(request("move", source, cwd, target=checked_path(target)))
    call.about = f"{source} to {target}"
    yield call
    call.result()


def upload(local: str | Path, path: str | PurePosixPath, *, cwd: str, mode: int | None = None) -> Operation[Transfer]:
    """Copy a host file or directory tree into the sandbox, with modes, modification times and holes.

    A file replaces the content of what is at ``path`` (a link there is followed, inside). A tree is merged into the
    directory at ``path``. Below it nothing is followed: links, files and other things that stand in the way of a file
    or link are replaced; what stands in the way of a directory, or a directory in the way of a file, is an error.
    Symbolic links arrive as links, whatever they point to; hard links as files of their own; FIFOs, sockets and
    devices are skipped. A copy that fails half-way leaves what had arrived.

    Args:
        local: host path; if it is itself a link, what it points to is copied.
        path: path inside; missing parents are made.
        cwd: absolute directory inside.
        mode: permission bits for a file; None: those of the host file.

    Raises:
        InvalidValue: ``mode`` is given for a tree.
        FileAccessError: a file cannot be written, or the disk limit is reached.
        OSError: the host file or tree cannot be read.
    """
    status = Path(local).stat()  # looked at before it is opened: opening a device can do something
    if not _stat.S_ISDIR(status.st_mode) and not _stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "neither a file nor a directory", str(local))
    descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if _stat.S_ISDIR(status.st_mode):
        return (yield from _upload_tree(Upload(descriptor), status, path, cwd, mode))
    try:
        source = trees.pieces(descriptor, status.st_size)
        bits = _stat.S_IMODE(status.st_mode) if mode is None else mode
        call = WriteCall(path, cwd=cwd, mode=bits, source=source, mtime=status.st_mtime_ns)
        yield call
        return Transfer(1, call.result())
    finally:
        os.close(descriptor)


def _upload_tree(
    source: Upload, status: os.stat_result, path: str | PurePosixPath, cwd: str, mode: int | None
) -> Operation[Transfer]:
    try:
        if mode is not None:
            raise InvalidValue("a mode for a tree", hint="its files keep theirs; a mode is for a single file")
        bits, mtime = _stat.S_IMODE(status.st_mode), status.st_mtime_ns
        call = UploadCall(request("take_tree", path, cwd, mode=bits, mtime=mtime), source)
        yield call
        call.result()
        return source.transfer
    finally:
        source.close()


def download(path: str | PurePosixPath, local: str | Path, *, cwd: str, limit: int | None) -> Operation[Transfer]:
    """Copy a file or directory tree of the sandbox to the host; it appears under its name when it is complete.

    The tree is written next to its destination, through descriptors of its directories, following no link. Modes are
    kept as far as the umask allows, without setuid, setgid and sticky, and the owner can always read and write;
    modification times and holes are kept; hard links become files of their own. Links are kept if they are relative
    and cannot lead out of the tree; others, FIFOs, sockets, devices, and /proc are skipped and named.

    Args:
        path: path inside; if it is a link, what it points to is copied.
        local: host path; must not exist, or be a file if a file is copied.
        cwd: absolute directory inside.
        limit: most bytes of all files together, holes included; None: no limit.

    Raises:
        FileAccessError: there is no such path, it is neither file nor directory, or holds more than the limit or than
            a million entries.
        OSError: the host path cannot be written.
    """
    local = Path(local)
    if not local.name:
        raise InvalidValue(f"{str(local)!r} has no name to give to a copy")
    message = request("send_tree", path, cwd, limit=limit, most=MOST_ENTRIES)
    target = Download(local, limit)
    try:
        call = DownloadCall(message, target)
        yield call
        call.result()
        return target.publish()
    finally:
        target.close()


def usage() -> Operation[SandboxUsage]:
    """Return what the sandbox uses right now. Files in an upper on disk do not count as ``disk``."""
    call = UsageCall()
    yield call
    return call.result()
