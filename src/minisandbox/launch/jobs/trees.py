"""Directory trees walked and built by descriptors: depth costs neither stack nor open files nor PATH_MAX.

No link is ever followed. The worker and the controller use the same code, one to send and one to take: the frames of a
tree are ``directory``, ``file`` (then ``data``, ``hole`` and ``eof``), ``link``, ``skip``, and ``up`` where a directory
ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from . import frames

CHUNK = 1 << 20
"""Most bytes of content in one frame."""
_BATCH = 1 << 18
_PATIENCE = 1000
"""How often a directory that is being removed may get something new."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = "gone before it was read"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class Cursor:
    """A place in a tree: one descriptor, that goes down by a name and up by ``..``.

    Args:
        root: descriptor of the tree's directory, taken over.

    Attributes:
        fd: descriptor of the directory it stands in.
        names: how it came there from the root.
    """

    def __init__(self, root: int) -> None:
        self.fd = root
        self.names: list[str] = []
        self._above: list[tuple[int, int]] = []

    def down(self, name: str) -> None:
        """Enter a directory.

        Raises:
            OSError: there is none of that name (ENOTDIR for a link, too), or it cannot be read.
        """
        below = os.open(name, _DIRECTORY, dir_fd=self.fd)
        self._above.append(identity(os.fstat(self.fd)))
        self.names.append(name)
        self._stand_in(below)

    def up(self) -> str:
        """Return to where it came from; returns the name of the directory that was left.

        Raises:
            OSError: that directory lies elsewhere by now (ESTALE).
        """
        above = os.open("..", _DIRECTORY, dir_fd=self.fd)
        if identity(os.fstat(above)) != self._above.pop():
            os.close(above)
            raise OSError(errno.ESTALE, "a directory was moved meanwhile")
        self._stand_in(above)
        return self.names.pop()

    def path(self, name: str = "") -> str:
        """Where it stands, or where ``name`` is, relative to the root."""
        return "/".join([*self.names, name] if name else self.names)

    def close(self) -> None:
        """Let go of the directory."""
        self._stand_in(-1)

    def _stand_in(self, descriptor: int) -> None:
        old, self.fd = self.fd, descriptor
        if old >= 0:
            os.close(old)


def identity(status: os.stat_result) -> tuple[int, int]:
    """What tells two files apart."""
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a walk.

    Attributes:
        event: ``directory`` (it is entered), ``up`` (it is left), ``file``, ``link``, or ``skip`` for what is neither.
        name: its name in the directory that was entered last; empty for ``up``.
        status: what lstat(2) says, except for ``up`` and for what was gone.
        detail: the target of a link; why something is skipped.
        descriptor: of a file, open for reading until the next step.
    """

    event: str
    name: str = ""
    status: os.stat_result | None = None
    detail: str = ""
    descriptor: int = -1


def walk(cursor: Cursor, avoid: int = -1) -> Generator[Step, None, None]:
    """Everything below the directory where a cursor stands: first what is in a directory, then its subdirectories.

    Args:
        cursor: moves along.
        avoid: number of a device that is not entered (``st_dev``), or -1.

    Raises:
        OSError: something cannot be read; ``filename`` is its path relative to the cursor's root.
    """
    waiting: list[list[str]] = [[]]
    try:
        yield from _scan(cursor, avoid, waiting[0])
        while waiting:
            if not waiting[-1]:
                waiting.pop()
                if waiting:
                    cursor.up()
                    yield Step("up")
            elif (step := _enter(cursor, avoid, waiting[-1].pop())).event == "directory":
                yield step
                waiting.append([])
                yield from _scan(cursor, avoid, waiting[-1])
            else:
                yield step
    except OSError as error:
        raise OSError(error.errno, error.strerror, cursor.path(_name(error))) from error


def _name(error: OSError) -> str:
    return error.filename if isinstance(error.filename, str) and error.filename != ".." else ""


def _enter(cursor: Cursor, avoid: int, name: str) -> Step:
    try:
        cursor.down(name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return Step("skip", name, detail=_GONE)
        raise
    status = os.fstat(cursor.fd)
    if status.st_dev == avoid:
        cursor.up()
        return Step("skip", name, status, "a file system of the kernel")
    return Step("directory", name, status)


def walk_one(cursor: Cursor, name: str) -> Iterator[Step]:
    """What a name in the directory of a cursor stands for: a whole tree with its ``directory`` and ``up``, or a file.

    Raises:
        OSError: there is nothing of that name, or as :func:`walk`.
    """
    status = os.stat(name, dir_fd=cursor.fd, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        cursor.down(name)
        yield Step("directory", name, os.fstat(cursor.fd))
        yield from walk(cursor)
        cursor.up()
        yield Step("up")
    else:
        yield from _look_at(cursor.fd, name, -1)


def _scan(cursor: Cursor, avoid: int, below: list[str]) -> Iterator[Step]:
    """All of one directory but its subdirectories, whose names are put on ``below``."""
    with os.scandir(cursor.fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
            else:
                yield from _look_at(cursor.fd, entry.name, avoid)


def _look_at(directory: int, name: str, avoid: int) -> Iterator[Step]:
    """The step of something that is no directory; a file is open until the next."""
    try:
        step = _step(directory, name, avoid)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, name) from error
        step = Step("skip", name, detail=_GONE)
    try:
        yield step
    finally:
        if step.descriptor >= 0:
            os.close(step.descriptor)


def _step(directory: int, name: str, avoid: int) -> Step:
    # looked at before it is opened: opening a device can do something
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return Step("link", name, status, os.readlink(name, dir_fd=directory))
    if stat.S_ISREG(status.st_mode) and status.st_dev != avoid:
        descriptor = os.open(name, _FILE, dir_fd=directory)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return Step("file", name, status, descriptor=descriptor)
        os.close(descriptor)
    return Step("skip", name, status, kind(status))


def kind(status: os.stat_result) -> str:
    """What something is that is no file, directory or link, in words."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "a file of the kernel")


def pieces(descriptor: int, size: int) -> Iterator[bytes | int]:
    """The content of a file up to ``size``: bytes, at most :data:`CHUNK` at a time, and the sizes of its holes.

    A file that has no size, as some of the kernel's have none, is read to its end; one that shrinks ends early.
    """
    position = 0
    while position < size:
        start = min(seek(descriptor, position, os.SEEK_DATA, size), size)
        if start > position:
            yield start - position
        end = min(seek(descriptor, start, os.SEEK_HOLE, size), size) if start < size else size
        position = start
        while position < end:
            data = os.pread(descriptor, min(CHUNK, end - position), position)
            if not data:
                return
            position += len(data)
            yield data
    while size == 0 and (data := os.pread(descriptor, CHUNK, position)):
        position += len(data)
        yield data


def seek(descriptor: int, position: int, whence: int, size: int) -> int:
    """Where the next data or hole of a file begins (lseek(2)): its size where there is none."""
    try:
        return os.lseek(descriptor, position, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole from here on (lseek(2)), or the file has shrunk
            return size
        if error.errno == errno.EINVAL:  # a file system that knows no holes
            return position if whence == os.SEEK_DATA else size
        raise


@dataclass(slots=True)
class Tally:
    """What was sent so far, and how much may be.

    Attributes:
        limit: most bytes of content, holes included, or None.
        most: most entries.
        size: bytes so far.
        files: regular files so far.
        entries: files, directories, links and others so far.
    """

    limit: int | None
    most: int
    size: int = 0
    files: int = 0
    entries: int = 0

    def count(self, step: Step) -> None:
        """Add an entry.

        Raises:
            OSError: that makes too many, or a file is too large (EFBIG).
        """
        self.entries += step.event != "up"
        if self.entries > self.most:
            raise OSError(errno.EFBIG, f"more than {self.most} entries")
        if step.event == "file" and step.status is not None:
            self.files += 1
            self.check(step.status.st_size)

    def check(self, more: int) -> None:
        """Refuse what would be too large."""
        if self.limit is not None and self.size + more > self.limit:
            raise OSError(errno.EFBIG, f"larger than {self.limit} bytes")


def content_frames(descriptor: int, size: int, tally: Tally) -> Iterator[tuple[frames.Header, bytes]]:
    """A file's content as ``data`` and ``hole`` frames."""
    for piece in pieces(descriptor, size):
        length = piece if isinstance(piece, int) else len(piece)
        tally.check(length)
        tally.size += length
        if isinstance(piece, int):
            yield {"event": "hole", "size": piece}, b""
        else:
            yield {"event": "data"}, piece


def tree_frames(steps: Iterable[Step], tally: Tally) -> Iterator[tuple[frames.Header, bytes]]:
    """A walk as frames."""
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
    """Frames encoded, several small ones in one piece."""
    batch = bytearray()
    for header, payload in items:
        batch += frames.encode(header, payload)
        if len(batch) >= _BATCH:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


def remove(directory: int, name: str) -> None:
    """Remove a directory and all that is below it.

    What appears in it meanwhile is removed too, within reason.

    Args:
        directory: descriptor of the directory that it is in.
        name: its name there.

    Raises:
        OSError: something cannot be removed; ``filename`` is its path.
    """
    cursor, patience = Cursor(os.dup(directory)), _PATIENCE
    try:
        cursor.down(name)
        waiting = [_unlink_files(cursor.fd)]
        while waiting:
            if waiting[-1]:
                with contextlib.suppress(FileNotFoundError):
                    cursor.down(waiting[-1].pop())
                    waiting.append(_unlink_files(cursor.fd))
                continue
            waiting.pop()
            left = cursor.up()
            if not _remove_empty(cursor.fd, left, final=patience == 0):
                patience -= 1
                cursor.down(left)
                waiting.append(_unlink_files(cursor.fd))
    except OSError as error:
        raise OSError(error.errno, error.strerror, cursor.path(_name(error))) from error
    finally:
        cursor.close()


def _unlink_files(directory: int) -> list[str]:
    """Remove everything in a directory that is not one; returns the names of its subdirectories."""
    below: list[str] = []
    with os.scandir(directory) as entries:
        listed = list(entries)  # removing while reading can leave some out
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            below.append(entry.name)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=directory)
    return below


def _remove_empty(directory: int, name: str, *, final: bool) -> bool:
    """Remove a directory that was emptied; returns whether it had stayed empty."""
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or final:
            raise
        return False
    return True
