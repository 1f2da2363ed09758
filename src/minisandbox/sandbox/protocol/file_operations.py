"""Implement file operations and ``usage`` as generators of calls, without I/O of their own.

The driver of an operation runs each :class:`.wire.Call` that the generator yields, resumes it once the peer has
answered or hung up, and takes its return value. It must always close the generator (``operation.close()``), because
this removes a partial copy on the host. Every operation raises

* :class:`.InvalidValue` before the first call, if an argument is invalid;
* :class:`.FileAccessError`, if the kernel refused inside;
* :class:`.SandboxGone`, if the worker was killed or its answer is malformed.

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
from minisandbox.launch.kernel import syscalls as sc
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
    """Read a regular file into a stream, with holes as zeros.

    Args:
        path: path inside; a relative path is below ``cwd``; links are followed inside.
        cwd: absolute directory inside.
        limit: maximum bytes to read, or None.
        sink: stream to write the content to.

    Returns:
        The number of bytes.

    Raises:
        FileAccessError: there is no such file, it is not a regular file, or it is larger than the limit.
    """
    call = ReadCall(path, cwd=cwd, limit=limit, sink=sink)
    yield call
    return call.result()


def write(path: str | PurePosixPath, *, cwd: str, mode: int | None, source: Iterable[bytes]) -> Operation[int]:
    """Write a regular file from a stream; create the file and its parent directories if they are missing.

    Args:
        path: path inside; links are followed inside.
        cwd: absolute directory inside.
        mode: permission bits, or None to keep them (0644 for a new file).
        source: pieces of the content, of any size.

    Returns:
        The number of bytes.

    Raises:
        FileAccessError: the path cannot be written, or the sandbox's disk limit is reached.
    """
    call = WriteCall(path, cwd=cwd, mode=mode, source=source)
    yield call
    return call.result()


def list_directory(path: str | PurePosixPath, *, cwd: str) -> Operation[tuple[FileInfo, ...]]:
    """Return the entries of a directory, sorted by the bytes of their names, without descending.

    Raises:
        FileAccessError: there is no such directory, it lies in /proc, it has more than a million entries, or the
            names and link targets exceed the limit together.
    """
    call = EntriesCall("list", path, cwd, max_entries=MOST_ENTRIES)
    yield call
    return tuple(sorted(call.result(), key=lambda info: info.path.name.encode("utf-8", "surrogateescape")))


def stat(path: str | PurePosixPath, *, cwd: str, follow: bool = True) -> Operation[FileInfo]:
    """Return the status of a path, as :func:`os.stat` (with ``follow``) or :func:`os.lstat`.

    Raises:
        FileAccessError: there is no such file, or it is a link of /proc.
    """
    call = EntriesCall("stat", path, cwd, max_entries=1, follow=follow)
    yield call
    return call.result()[0]


def exists(path: str | PurePosixPath, *, cwd: str) -> Operation[bool]:
    """Return whether a path exists, following links; False for a dangling link."""
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
    """Create a directory with exactly this mode; leave an existing directory unchanged.

    Args:
        path: path inside.
        cwd: absolute directory inside.
        mode: permission bits.
        parents: whether to create missing parents too, with mode 0755.
        exist_ok: whether to accept an existing directory, or a link to one.

    Raises:
        FileAccessError: the path exists, a parent is missing, or the directory cannot be created.
    """
    call = DoneCall(request("mkdir", path, cwd, mode=mode, parents=parents, exist_ok=exist_ok))
    yield call
    call.result()


def remove(
    path: str | PurePosixPath, *, cwd: str, recursive: bool = False, missing_ok: bool = False
) -> Operation[None]:
    """Remove a file, a directory, or a link (but not its target).

    Args:
        path: path inside.
        cwd: absolute directory inside.
        recursive: whether to remove a directory with everything below it; links in it are removed, not followed.
        missing_ok: whether to accept a missing path.

    Raises:
        FileAccessError: there is no such file, the directory is not empty, or it cannot be removed.
    """
    call = DoneCall(request("remove", path, cwd, recursive=recursive, missing_ok=missing_ok))
    yield call
    call.result()


def move(source: str | PurePosixPath, target: str | PurePosixPath, *, cwd: str) -> Operation[None]:
    """Rename a path as rename(2) does: replace a file or an empty directory at the target, and move links themselves.

    Missing parents of the target are created. The kernel cannot rename to another mount, and overlayfs cannot rename a
    directory of the image. Then the tree is copied next to the target, renamed into place, and removed at its source.
    The copy keeps owners, modes, times and holes; hard links become separate files.

    Raises:
        FileAccessError: there is no such source, the target is a non-empty directory or lies below the source, or the
            disk limit is reached.
    """
    call = DoneCall(request("move", source, cwd, target=checked_path(target)))
    call.subject = f"{source} to {target}"
    yield call
    call.result()


def upload(local: str | Path, path: str | PurePosixPath, *, cwd: str, mode: int | None = None) -> Operation[Transfer]:
    """Copy a host file or directory tree into the sandbox, with modes, modification times and holes.

    A file replaces the content of the file at ``path``, following a link inside. A tree is merged into the directory at
    ``path``, where no links are followed. A file or link replaces any existing entry except a directory. A conflict
    between a directory and another kind of entry is an error. Symbolic links are copied as links, whatever they point
    to; hard links become separate files; FIFOs, sockets and devices are skipped. If the copy fails, the part copied so
    far remains.

    Args:
        local: host path; a link is replaced by its target.
        path: path inside; missing parents are created.
        cwd: absolute directory inside.
        mode: permission bits for a file; None: those of the host file.

    Raises:
        InvalidValue: ``mode`` is given for a tree.
        FileAccessError: a file cannot be written, or the disk limit is reached.
        OSError: the host file or tree cannot be read.
    """
    status = Path(local).stat()  # before opening it: opening a device can have side effects
    if not _stat.S_ISDIR(status.st_mode) and not _stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "neither a file nor a directory", str(local))
    descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if _stat.S_ISDIR(status.st_mode):
        return (yield from _upload_tree(Upload(descriptor), status, path, cwd, mode))
    with sc.closing(descriptor):
        source = trees.pieces(descriptor, status.st_size)
        mode_bits = _stat.S_IMODE(status.st_mode) if mode is None else mode
        call = WriteCall(path, cwd=cwd, mode=mode_bits, source=source, mtime=status.st_mtime_ns)
        yield call
        return Transfer(1, call.result())


def _upload_tree(
    source: Upload, status: os.stat_result, path: str | PurePosixPath, cwd: str, mode: int | None
) -> Operation[Transfer]:
    try:
        if mode is not None:
            raise InvalidValue("a mode for a tree", hint="its files keep theirs; a mode is for a single file")
        mode_bits, mtime = _stat.S_IMODE(status.st_mode), status.st_mtime_ns
        call = UploadCall(request("take_tree", path, cwd, mode=mode_bits, mtime=mtime), source)
        yield call
        call.result()
        return source.transfer
    finally:
        source.close()


def download(path: str | PurePosixPath, local: str | Path, *, cwd: str, limit: int | None) -> Operation[Transfer]:
    """Copy a file or directory tree of the sandbox to the host; it appears under its name once it is complete.

    The tree is written next to its destination, through descriptors of its directories and without following links.
    Modes are kept as far as the umask allows, without setuid, setgid and sticky bits, and the owner can always read and
    write. Modification times and holes are kept; hard links become separate files. Links are kept if they are relative
    and cannot lead out of the tree. Other links, FIFOs, sockets, devices and /proc are skipped and reported.

    Args:
        path: path inside; a link is replaced by its target.
        local: host path; it must not exist, but for a file it may be an existing file.
        cwd: absolute directory inside.
        limit: maximum bytes of all files together, holes included; None: no limit.

    Raises:
        FileAccessError: there is no such path, it is neither a file nor a directory, or it exceeds the limit or a
            million entries.
        OSError: the host path cannot be written.
    """
    local = Path(local)
    if not local.name:
        raise InvalidValue(f"{str(local)!r} has no name to give to a copy")
    header = request("send_tree", path, cwd, limit=limit, most=MOST_ENTRIES)
    target = Download(local, limit)
    try:
        call = DownloadCall(header, target)
        yield call
        call.result()
        return target.publish()
    finally:
        target.close()


def usage() -> Operation[SandboxUsage]:
    """Return the current resource use of the sandbox; files in an upper given by the caller do not count as disk."""
    call = UsageCall()
    yield call
    return call.result()
