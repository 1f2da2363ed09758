"""The changes of a workspace, read from its uppers by a process in a second sandbox.

The root directory of that sandbox holds ``trees/N`` (the uppers, topmost first), ``base`` (the image) and, if ``/usr``
was writable, ``base-usr``. An agent made the trees: they are opened component by component, and no link is followed. An
upper marks *deleted* by a device 0/0 and *replaced* by ``user.overlay.opaque`` (overlayfs.rst).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from .job import Job
from .trees import identity

_OPAQUE = "user.overlay.opaque"
_ROWS = 500
_PAGE_SIZE = 1 << 18
"""Characters of paths in one frame, which keeps it below ``frames.MAX_HEADER``."""
_MOST_ROWS = 1 << 21
MOST_CHARACTERS = 1 << 26
"""Of all paths together: a long directory name repeats in the path of every file below it."""
_TRIES = 16
"""How often to retry a path that vanishes meanwhile."""
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_CHUNK = 1 << 16
_MOST_OPEN = 1000
"""Directories that are kept open: the workspace may move them without harm."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}

Row = tuple[str, str, str]
"""Path, change, kind."""


def serve(job: Job) -> None:
    """Answer a ``changes`` request: frames of rows, then ``end``.

    The request names the ``trees`` (how many), whether there is a ``usr`` of its own, the path ``below`` which to look,
    paths to ``skip``, because the sandbox's own mounts made them, and the most ``characters`` that paths may have in
    all.
    """
    trees, below, skipped = job.request["trees"], job.request["below"], job.request["skip"]
    most = job.request["characters"]
    assert isinstance(trees, int)
    assert isinstance(below, str)
    assert isinstance(skipped, list)
    assert isinstance(most, int)
    try:
        changes = _all_changes(trees, below, usr=bool(job.request["usr"]))
        for page in _pages((row for row in changes if row[0] not in skipped), min(most, MOST_CHARACTERS)):
            job.send({"event": "changes", "rows": page})
        job.send({"event": "end"})
    except OSError as error:
        job.fail(error, "compare", error.filename or "/")


def _pages(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    page: list[Row] = []
    count = size = in_page = 0
    for row in rows:
        page.append(row)
        in_page += len(row[0])
        count, size = count + 1, size + len(row[0])
        if count > _MOST_ROWS or size > most:
            raise OSError(errno.EFBIG, f"more than {_MOST_ROWS} changes, or {most} characters of paths")
        if len(page) >= _ROWS or in_page > _PAGE_SIZE:
            yield page
            page, in_page = [], 0
    if page:
        yield page


def _all_changes(trees: int, below: str, *, usr: bool) -> Iterator[Row]:
    yield from _compare_all("base", [f"trees/{number}/upper" for number in range(trees)], "/", below)
    if usr:
        yield from _compare_all("base-usr", [f"trees/{number}/usr" for number in range(trees)], "/usr/", below)


def _compare_all(base: str, uppers: list[str], prefix: str, below: str) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_Directory.open(None, path)) for path in (base, *uppers)]
        yield from _changes_below(prefix, _Views(tuple(opened[1:]), opened[0], opened[0]), below)


class _Directory:
    """An open directory of one tree. It can be closed for a while and reopened from a directory below it."""

    def __init__(self, descriptor: int, above: _Directory | None) -> None:
        self.descriptor = descriptor
        self._above = above
        self._left: tuple[int, int] | None = None

    @classmethod
    def open(cls, parent: _Directory | None, name: str) -> _Directory:
        return cls(os.open(name, _DIRECTORY, dir_fd=None if parent is None else parent.descriptor), parent)

    def leave_above(self) -> None:
        """Close the directory above."""
        if (above := self._above) is not None and above.descriptor >= 0:
            above._left = identity(os.fstat(above.descriptor))
            above.close()

    def come_back(self) -> None:
        """Open the directory above again, if it was left.

        Raises:
            OSError: this one lies elsewhere by now (ESTALE).
        """
        if (above := self._above) is None or above._left is None:
            return
        above.descriptor = os.open("..", _DIRECTORY, dir_fd=self.descriptor)
        if identity(os.fstat(above.descriptor)) != above._left:
            raise OSError(errno.ESTALE, "a directory was moved while it was looked at")
        above._left = None

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    @property
    def opaque(self) -> bool:
        try:
            return os.getxattr(self.descriptor, _OPAQUE) == b"y"
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class _Views:
    """One directory of the workspace, by the trees that make it up.

    Attributes:
        uppers: its upper directories, the topmost first.
        below: the image's directory that shows through them, or None where it was replaced or never was.
        base: the image's directory at this path, shown or not, or None.
    """

    uppers: tuple[_Directory, ...]
    below: _Directory | None
    base: _Directory | None

    @property
    def directories(self) -> tuple[_Directory, ...]:
        return self.uppers if self.base is None else (*self.uppers, self.base)


@dataclass(frozen=True, slots=True)
class _Now:
    """The present state of a path.

    Attributes:
        status: its lstat(2), or None if it is deleted.
        holder: the directory that has it.
        uppers: for a directory, the trees that it consists of.
        through: whether the image shows through them.
    """

    status: os.stat_result | None
    holder: _Directory | None = None
    uppers: tuple[_Directory, ...] = ()
    through: bool = False


@dataclass(slots=True)
class _Level:
    """A directory under comparison.

    Attributes:
        prefix: its path, with a slash.
        views: the directory.
        names: its entries still to compare, the next one last.
        opened: closes its descriptors.
    """

    prefix: str
    views: _Views
    names: list[str]
    opened: contextlib.ExitStack

    @classmethod
    def of(cls, prefix: str, views: _Views, opened: contextlib.ExitStack, below: str) -> _Level:
        names = _names(views)
        if below.startswith(prefix) and below != prefix:  # it is on the way there
            names &= {below[len(prefix) :].split("/", maxsplit=1)[0]}
        return cls(prefix, views, sorted(names, reverse=True), opened)

    def leave_above(self) -> None:
        for directory in self.views.directories:
            directory.leave_above()

    def close(self) -> None:
        with self.opened:
            for directory in self.views.directories:
                directory.come_back()


def _changes_below(prefix: str, views: _Views, below: str) -> Iterator[Row]:
    """Compare all below. Depth costs no stack and few open files: a directory far above is reopened by ``..``."""
    levels = [_Level.of(prefix, views, contextlib.ExitStack(), below)]
    try:
        while levels:
            level = levels[-1]
            if not level.names:
                level.close()
                levels.pop()
                continue
            name = level.names.pop()
            with contextlib.ExitStack() as opened:
                row, inside = _compare(level.prefix + name, name, level.views, opened)
                if row is not None:
                    yield row
                if inside is not None:
                    levels.append(_Level.of(f"{level.prefix}{name}/", inside, opened.pop_all(), below))
            if inside is not None and len(levels) * len(views.directories) > _MOST_OPEN:
                levels[-1].leave_above()
    finally:
        for level in levels:
            level.opened.close()


def _names(views: _Views) -> set[str]:
    names: set[str] = set()
    for upper in views.uppers:
        names.update(os.listdir(upper.descriptor))
    if views.base is not views.below and views.base is not None:  # replaced: what was there may be gone
        names.update(os.listdir(views.base.descriptor))
    return names


def _resolve(views: _Views, name: str) -> _Now:
    """Merge the trees for one name, as overlayfs does."""
    found: _Now | None = None
    parts: list[_Directory] = []
    for upper in views.uppers:
        status = upper.look(name)
        if status is None:
            continue
        if not stat.S_ISDIR(status.st_mode):
            if found is None:
                return _Now(None) if _is_whiteout(status) else _Now(status, upper)
            return _Now(found.status, found.holder, tuple(parts), through=False)
        found = found or _Now(status, upper)
        parts.append(upper)
        with _Directory.open(upper, name) as directory:
            if directory.opaque:
                return _Now(found.status, found.holder, tuple(parts), through=False)
    below = views.below.look(name) if views.below else None
    if found is None:
        return _Now(below, views.below)
    return _Now(found.status, found.holder, tuple(parts), through=below is not None and stat.S_ISDIR(below.st_mode))


def _compare(path: str, name: str, views: _Views, stack: contextlib.ExitStack) -> tuple[Row | None, _Views | None]:
    """Return the change of a path, and the directories to compare below it.

    The workspace may be running: a path that vanishes meanwhile is retried.

    Args:
        path: the path.
        name: the last part of it.
        views: the directory that it is in.
        stack: closes the opened directories.
    """
    for attempt in range(_TRIES):
        try:
            now = _resolve(views, name)
            was = views.base.look(name) if views.base else None
            return _row(path, name, views, now, was), _below(name, views, now, was, stack)
        except OSError as error:
            if error.errno not in _VANISHED or attempt == _TRIES - 1:
                raise OSError(error.errno, error.strerror, path) from error
    raise AssertionError


def _row(path: str, name: str, views: _Views, now: _Now, was: os.stat_result | None) -> Row | None:
    status = now.status
    if status is None:
        return None if was is None else (path, "deleted", _kind(was))
    if was is None:
        return path, "added", _kind(status)
    return (path, "modified", _kind(status)) if _differs(now, name, views, was) else None


def _below(
    name: str, views: _Views, now: _Now, was: os.stat_result | None, stack: contextlib.ExitStack
) -> _Views | None:
    """The directories of that name, where something below them can differ."""
    was_directory = was is not None and stat.S_ISDIR(was.st_mode)
    is_directory = now.status is not None and stat.S_ISDIR(now.status.st_mode)
    if not now.uppers and (is_directory or not was_directory):
        return None
    uppers = tuple(stack.enter_context(_Directory.open(upper, name)) for upper in now.uppers)
    base = None
    if was_directory and views.base is not None:
        base = stack.enter_context(_Directory.open(views.base, name))
    return _Views(uppers, base if now.through else None, base)


def _differs(now: _Now, name: str, views: _Views, was: os.stat_result) -> bool:
    status, holder, base = now.status, now.holder, views.base
    assert status is not None
    assert holder is not None
    assert base is not None
    if holder is base:
        return False
    if (status.st_mode, status.st_uid, status.st_gid) != (was.st_mode, was.st_uid, was.st_gid):
        return True
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(name, dir_fd=holder.descriptor) != os.readlink(name, dir_fd=base.descriptor)
    if stat.S_ISREG(status.st_mode):
        return status.st_size != was.st_size or not _same_content(holder, base, name)
    return False


def _same_content(one: _Directory, other: _Directory, name: str) -> bool:
    with (
        open(os.open(name, _FILE, dir_fd=one.descriptor), "rb", buffering=0) as left,
        open(os.open(name, _FILE, dir_fd=other.descriptor), "rb", buffering=0) as right,
    ):
        while True:
            mine, theirs = left.read(_CHUNK), right.read(_CHUNK)
            if mine != theirs:
                return False
            if not mine:
                return True


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "device")
