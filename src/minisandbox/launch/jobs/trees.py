"""Walk directory trees by descriptors, without recursion and without following links.

The depth of a tree is not limited by the stack, by open files or by PATH_MAX. The worker and the controller share this
code, for one to send and the other to receive. The frames of a tree are ``directory``, ``file`` (then ``data``,
``hole`` and ``eof``), ``link``, ``skip``, and ``up`` at the end of a directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from minisandbox.launch.kernel import syscalls as sc

from . import frames

CHUNK = 1 << 20
"""Maximum bytes of content in one frame."""
_BATCH = 1 << 18
_MOST_RETRIES = 1000
"""How often new entries may appear in directories that are being removed."""
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = "gone before it was read"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class DirWalker:
    """A position in a directory tree, which moves down by name and up again without following a link.

    Args:
        root: descriptor of the tree's root; the walker closes it.
        keep_open: how many directories above the current one stay open, counted from the root. Open directories may be
            moved during the walk; the walker reopens deeper ones through ``..``.

    Attributes:
        fd: descriptor of the current directory.
        names: components of the path from the root to the current directory.
    """

    def __init__(self, root: int, keep_open: int = 0) -> None:
        self.fd = root
        self.names: list[str] = []
        self._keep_open = keep_open
        self._open_above: list[int] = []
        self._closed_above: list[tuple[int, int]] = []

    def down(self, name: str) -> None:
        """Enter a directory.

        Raises:
            OSError: the entry is missing, not a directory (ENOTDIR for a link, too), or cannot be read.
        """
        child = os.open(name, DIRECTORY_FLAGS, dir_fd=self.fd)
        self.names.append(name)
        if len(self._open_above) < self._keep_open:
            self._open_above.append(self.fd)
        else:
            self._closed_above.append(identity(os.fstat(self.fd)))
            os.close(self.fd)
        self.fd = child

    def up(self) -> str:
        """Go to the parent directory; return the name of the directory left.

        Raises:
            OSError: the current directory was moved (ESTALE). The next call tries the directory above that.
        """
        name = self.names.pop()
        if self._closed_above:
            expected = self._closed_above.pop()
            parent = os.open("..", DIRECTORY_FLAGS, dir_fd=self.fd)
            if identity(os.fstat(parent)) != expected:
                os.close(parent)
                raise OSError(errno.ESTALE, "a directory was moved meanwhile", name)
        else:
            parent = self._open_above.pop()
        os.close(self.fd)
        self.fd = parent
        return name

    def path(self, name: str = "") -> str:
        """Return the path of the current directory, or of ``name`` in it, relative to the root."""
        return "/".join([*self.names, name] if name else self.names)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.fd, *self._open_above):
            if descriptor >= 0:
                os.close(descriptor)
        self.fd, self._open_above = -1, []


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return the device and inode, which identify a file."""
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class TreeStep:
    """One step of a walk.

    Attributes:
        event: ``directory`` (entered), ``up`` (left), ``file``, ``link``, or ``skip`` for any other kind of entry.
        name: name of the entry in the current directory; empty for ``up``.
        status: lstat(2) of the entry; None for ``up`` and for an entry that has vanished.
        detail: target of a link, or reason for a skip.
        descriptor: descriptor of a file, open for reading until the next step; else -1.
    """

    event: str
    name: str = ""
    status: os.stat_result | None = None
    detail: str = ""
    descriptor: int = -1


def walk(walker: DirWalker, skipped_device: int = -1) -> Generator[TreeStep, None, None]:
    """Yield everything below the walker's directory; in each directory, files come before subdirectories.

    Args:
        walker: position to start at; it moves through the tree.
        skipped_device: device number (``st_dev``) of a file system to skip, or -1.

    Raises:
        OSError: an entry cannot be read; ``filename`` is its path relative to the walker's root.
    """
    pending: list[list[str]] = [[]]
    try:
        yield from _scan(walker, skipped_device, pending[0])
        while pending:
            if not pending[-1]:
                pending.pop()
                if pending:
                    walker.up()
                    yield TreeStep("up")
            elif (step := _enter(walker, skipped_device, pending[-1].pop())).event == "directory":
                yield step
                pending.append([])
                yield from _scan(walker, skipped_device, pending[-1])
            else:
                yield step
    except OSError as error:
        raise OSError(error.errno, error.strerror, walker.path(_name(error))) from error


def _name(error: OSError) -> str:
    return error.filename if isinstance(error.filename, str) and error.filename != ".." else ""


def _enter(walker: DirWalker, skipped_device: int, name: str) -> TreeStep:
    try:
        walker.down(name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return TreeStep("skip", name, detail=_GONE)
        raise
    status = os.fstat(walker.fd)
    if status.st_dev == skipped_device:
        walker.up()
        return TreeStep("skip", name, status, "a file system of the kernel")
    return TreeStep("directory", name, status)


def walk_statuses(walker: DirWalker) -> Iterator[os.stat_result]:
    """Yield the lstat(2) of everything below the walker's directory, even if the tree changes during the walk.

    Directories that vanish or cannot be read are skipped. If a directory is moved and the walker does not keep its
    parent open, the remaining siblings are skipped too.
    """
    pending: list[list[str]] = [[]]
    yield from _statuses(walker.fd, pending[0])
    while pending:
        if pending[-1]:
            try:
                walker.down(pending[-1].pop())
            except OSError:
                continue
            pending.append([])
            yield from _statuses(walker.fd, pending[-1])
            continue
        pending.pop()
        while pending:
            try:
                walker.up()
                break
            except OSError:
                pending.pop()


def _statuses(directory: int, subdirectories: list[str]) -> Iterator[os.stat_result]:
    """Yield the lstat(2) of a directory's entries; add the names of its subdirectories to ``subdirectories``."""
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # the entry has just been removed
                continue
            if stat.S_ISDIR(status.st_mode):
                subdirectories.append(entry.name)
            yield status


def walk_one(walker: DirWalker, name: str) -> Iterator[TreeStep]:
    """Yield the steps of one entry of the walker's directory: a file, or a tree with its ``directory`` and ``up``.

    Raises:
        OSError: the entry is missing, or :func:`walk` raised it.
    """
    status = os.stat(name, dir_fd=walker.fd, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        walker.down(name)
        yield TreeStep("directory", name, os.fstat(walker.fd))
        yield from walk(walker)
        walker.up()
        yield TreeStep("up")
    else:
        yield from _look_at(walker.fd, name, -1)


def _scan(walker: DirWalker, skipped_device: int, subdirectories: list[str]) -> Iterator[TreeStep]:
    """Yield the entries of one directory except its subdirectories; add the names of these to ``subdirectories``."""
    with os.scandir(walker.fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                subdirectories.append(entry.name)
            else:
                yield from _look_at(walker.fd, entry.name, skipped_device)


def _look_at(directory: int, name: str, skipped_device: int) -> Iterator[TreeStep]:
    """Yield the step of an entry that is not a directory; a file stays open until the next step."""
    try:
        step = _step(directory, name, skipped_device)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, name) from error
        step = TreeStep("skip", name, detail=_GONE)
    try:
        yield step
    finally:
        if step.descriptor >= 0:
            os.close(step.descriptor)


def _step(directory: int, name: str, skipped_device: int) -> TreeStep:
    # check the kind before opening: opening a device can have side effects
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return TreeStep("link", name, status, os.readlink(name, dir_fd=directory))
    if stat.S_ISREG(status.st_mode) and status.st_dev != skipped_device:
        descriptor = os.open(name, FILE_FLAGS, dir_fd=directory)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return TreeStep("file", name, status, descriptor=descriptor)
        os.close(descriptor)
    return TreeStep("skip", name, status, kind(status))


def kind(status: os.stat_result) -> str:
    """Describe the kind of an entry that is not a file, directory or link."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "a file of the kernel")


def pieces(descriptor: int, size: int) -> Iterator[bytes | int]:
    """Yield the content of a file up to ``size``: chunks of at most :data:`CHUNK` bytes, and the sizes of its holes.

    A file of size 0 is read to its end, because some kernel files report that size. If a file shrinks, the content ends
    early.
    """
    position = 0
    while position < size:
        start = min(seek(descriptor, position, os.SEEK_DATA, size), size)
        if start > position:
            yield start - position
        end = min(seek(descriptor, start, os.SEEK_HOLE, size), size) if start < size else size
        position = start
        while position < end:
            chunk = os.pread(descriptor, min(CHUNK, end - position), position)
            if not chunk:
                return
            position += len(chunk)
            yield chunk
    while size == 0 and (chunk := os.pread(descriptor, CHUNK, position)):
        position += len(chunk)
        yield chunk


def seek(descriptor: int, position: int, whence: int, size: int) -> int:
    """Return the start of the next data or hole of a file (lseek(2)), or the file's size if there is none."""
    try:
        return os.lseek(descriptor, position, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole remains (lseek(2)), or the file has shrunk
            return size
        if error.errno == errno.EINVAL:  # a file system without holes
            return position if whence == os.SEEK_DATA else size
        raise


@dataclass(slots=True)
class Tally:
    """Counts the bytes and entries sent, and enforces their limits.

    Attributes:
        limit: maximum bytes of content, holes included, or None.
        max_entries: maximum number of entries.
        size: bytes so far.
        files: regular files so far.
        entries: files, directories, links and others so far.
    """

    limit: int | None
    max_entries: int
    size: int = 0
    files: int = 0
    entries: int = 0

    def count(self, step: TreeStep) -> None:
        """Add an entry.

        Raises:
            OSError: there are too many entries, or a file is too large (EFBIG).
        """
        self.entries += step.event != "up"
        if self.entries > self.max_entries:
            raise OSError(errno.EFBIG, f"more than {self.max_entries} entries")
        if step.event == "file" and step.status is not None:
            self.files += 1
            self.check(step.status.st_size)

    def check(self, added_size: int) -> None:
        """Raise EFBIG if this many more bytes would exceed the limit."""
        if self.limit is not None and self.size + added_size > self.limit:
            raise OSError(errno.EFBIG, f"larger than {self.limit} bytes")


def content_frames(descriptor: int, size: int, tally: Tally) -> Iterator[tuple[frames.Header, bytes]]:
    """Yield a file's content as ``data`` and ``hole`` frames."""
    for piece in pieces(descriptor, size):
        length = piece if isinstance(piece, int) else len(piece)
        tally.check(length)
        tally.size += length
        if isinstance(piece, int):
            yield {"event": "hole", "size": piece}, b""
        else:
            yield {"event": "data"}, piece


def tree_frames(steps: Iterable[TreeStep], tally: Tally) -> Iterator[tuple[frames.Header, bytes]]:
    """Encode the steps of a walk as frames."""
    for step in steps:
        tally.count(step)
        header: frames.Header = {"event": step.event}
        if step.event != "up":
            header["name"] = step.name
        if step.event in ("link", "skip"):
            header["detail"] = step.detail
        if step.status is not None:
            header |= {"mode": stat.S_IMODE(step.status.st_mode), "mtime": step.status.st_mtime_ns}
        yield header, b""
        if step.event == "file" and step.status is not None:
            yield from content_frames(step.descriptor, step.status.st_size, tally)
            yield {"event": "eof"}, b""


def batches(items: Iterable[tuple[frames.Header, bytes]]) -> Iterator[bytes]:
    """Yield encoded frames, with small frames joined into larger pieces."""
    batch = bytearray()
    for header, payload in items:
        batch += frames.encode(header, payload)
        if len(batch) >= _BATCH:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


def remove(directory: int, name: str, *, force: bool = False) -> None:
    """Remove a directory tree, even if up to 1,000 times new entries appear in it meanwhile.

    Args:
        directory: descriptor of the parent directory.
        name: name of the directory to remove.
        force: whether to grant the owner missing permissions on directories.

    Raises:
        OSError: an entry cannot be removed; ``filename`` is its path.
    """
    walker, retries = DirWalker(os.dup(directory)), _MOST_RETRIES
    try:
        pending = [_enter_and_empty(walker, name, force=force)]
        while pending:
            if pending[-1]:
                with contextlib.suppress(FileNotFoundError):
                    pending.append(_enter_and_empty(walker, pending[-1].pop(), force=force))
                continue
            pending.pop()
            emptied_name = walker.up()
            if not _remove_empty(walker.fd, emptied_name, is_final=retries == 0):
                retries -= 1
                pending.append(_enter_and_empty(walker, emptied_name, force=force))
    except OSError as error:
        raise OSError(error.errno, error.strerror, walker.path(_name(error))) from error
    finally:
        walker.close()


def _enter_and_empty(walker: DirWalker, name: str, *, force: bool) -> list[str]:
    """Enter a directory and remove all its entries except subdirectories; return the names of these."""
    try:
        walker.down(name)
    except PermissionError:
        if not force:
            raise
        _grant(walker.fd, name)
        walker.down(name)
    if force and os.fstat(walker.fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(walker.fd, stat.S_IRWXU)
    return _unlink_files(walker.fd)


def _grant(directory: int, name: str) -> None:
    """Set mode 0700 on a directory that cannot be opened, by an O_PATH descriptor so that no link is followed."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with sc.closing(os.open(name, flags, dir_fd=directory)) as descriptor:
        os.chmod(f"/proc/thread-self/fd/{descriptor}", stat.S_IRWXU)


def _unlink_files(directory: int) -> list[str]:
    """Remove all entries of a directory except subdirectories; return the names of these."""
    subdirectories: list[str] = []
    with os.scandir(directory) as entries:
        all_entries = list(entries)  # list first: removals during a scan can hide entries
    for entry in all_entries:
        if entry.is_dir(follow_symlinks=False):
            subdirectories.append(entry.name)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=directory)
    return subdirectories


def _remove_empty(directory: int, name: str, *, is_final: bool) -> bool:
    """Remove an emptied directory; return False if new entries have appeared in it."""
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or is_final:
            raise
        return False
    return True
