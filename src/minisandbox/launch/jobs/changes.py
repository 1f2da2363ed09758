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

from .job import WorkerJob
from .trees import DIRECTORY_FLAGS, FILE_FLAGS, DirWalker

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
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}

Row = tuple[str, str, str]
"""Path, change, kind."""


def serve(job: WorkerJob) -> None:
    """Answer a ``changes`` request: frames of rows, then ``end``.

    The request names the ``trees`` (how many), whether there is a ``usr`` of its own, the path ``below`` which to look,
    paths to ``skip``, because the sandbox's own mounts made them, and the most ``characters`` that paths may have in
    all.
    """
    trees, below, skipped = job.request["trees"], job.request["below"], job.request["skip"]
    max_characters = job.request["characters"]
    assert isinstance(trees, int)
    assert isinstance(below, str)
    assert isinstance(skipped, list)
    assert isinstance(max_characters, int)
    try:
        changes = _all_changes(trees, below, usr=bool(job.request["usr"]))
        for page in _pages((row for row in changes if row[0] not in skipped), min(max_characters, MOST_CHARACTERS)):
            job.send({"event": "changes", "rows": page})
        job.send({"event": "end"})
    except OSError as error:
        job.fail(error, "compare", error.filename or "/")


def _pages(rows: Iterable[Row], max_characters: int) -> Iterator[list[Row]]:
    page: list[Row] = []
    count = size = in_page = 0
    for row in rows:
        page.append(row)
        in_page += len(row[0])
        count, size = count + 1, size + len(row[0])
        if count > _MOST_ROWS or size > max_characters:
            raise OSError(errno.EFBIG, f"more than {_MOST_ROWS} changes, or {max_characters} characters of paths")
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
    keep_open = _MOST_OPEN // (len(uppers) + 1)
    with contextlib.ExitStack() as stack:
        walkers = [
            stack.enter_context(contextlib.closing(DirWalker(os.open(path, DIRECTORY_FLAGS), keep_open)))
            for path in (base, *uppers)
        ]
        yield from _changes_below(prefix, _Views(tuple(walkers[1:]), walkers[0], walkers[0]), below)


@dataclass(frozen=True, slots=True)
class _Views:
    """One directory of the workspace, by the trees that make it up; their walkers are there.

    Attributes:
        uppers: the uppers that have it, the topmost first.
        below: the image if its directory shows through them, or None.
        base: the image if it has the directory, shown or not, or None.
    """

    uppers: tuple[DirWalker, ...]
    below: DirWalker | None
    base: DirWalker | None

    def leave(self) -> None:
        """Return to the directory above.

        Raises:
            OSError: a directory was moved (ESTALE).
        """
        for walker in self.uppers if self.base is None else (*self.uppers, self.base):
            walker.up()


@dataclass(frozen=True, slots=True)
class _Now:
    """The present state of a path.

    Attributes:
        status: its lstat(2), or None if it is deleted.
        holder: the tree that has it.
        uppers: for a directory, the trees that it consists of.
        through: whether the image shows through them.
    """

    status: os.stat_result | None
    holder: DirWalker | None = None
    uppers: tuple[DirWalker, ...] = ()
    through: bool = False


@dataclass(slots=True)
class _Level:
    """A directory under comparison.

    Attributes:
        prefix: its path, with a slash.
        views: the directory.
        names: its entries still to compare, the next one last.
    """

    prefix: str
    views: _Views
    names: list[str]

    @classmethod
    def of(cls, prefix: str, views: _Views, below: str) -> _Level:
        names = _names(views)
        if below.startswith(prefix) and below != prefix:  # this directory is on the way there
            names &= {below[len(prefix) :].split("/", maxsplit=1)[0]}
        return cls(prefix, views, sorted(names, reverse=True))


def _changes_below(prefix: str, views: _Views, below: str) -> Iterator[Row]:
    """Compare all below; depth costs no stack and few open files."""
    levels = [_Level.of(prefix, views, below)]
    while True:
        level = levels[-1]
        if level.names:
            name = level.names.pop()
            row, inside = _compare(level.prefix + name, name, level.views)
            if row is not None:
                yield row
            if inside is not None:
                levels.append(_Level.of(f"{level.prefix}{name}/", inside, below))
        elif len(levels) == 1:
            return
        else:
            levels.pop().views.leave()


def _names(views: _Views) -> set[str]:
    names: set[str] = set()
    for upper in views.uppers:
        names.update(os.listdir(upper.fd))
    if views.base is not views.below and views.base is not None:  # replaced: entries of the image may be deleted
        names.update(os.listdir(views.base.fd))
    return names


def _resolve(views: _Views, name: str) -> _Now:
    """Merge the trees for one name, as overlayfs does."""
    top: _Now | None = None
    parts: list[DirWalker] = []
    for upper in views.uppers:
        status = _status(upper, name)
        if status is None:
            continue
        if not stat.S_ISDIR(status.st_mode):
            if top is None:
                return _Now(None) if _is_whiteout(status) else _Now(status, upper)
            return _Now(top.status, top.holder, tuple(parts), through=False)
        top = top or _Now(status, upper)
        parts.append(upper)
        if _is_opaque(upper, name):
            return _Now(top.status, top.holder, tuple(parts), through=False)
    below = _status(views.below, name)
    if top is None:
        return _Now(below, views.below)
    return _Now(top.status, top.holder, tuple(parts), through=below is not None and stat.S_ISDIR(below.st_mode))


def _status(walker: DirWalker | None, name: str) -> os.stat_result | None:
    try:
        return None if walker is None else os.stat(name, dir_fd=walker.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(upper: DirWalker, name: str) -> bool:
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=upper.fd)
    try:
        return os.getxattr(descriptor, _OPAQUE) == b"y"
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _compare(path: str, name: str, views: _Views) -> tuple[Row | None, _Views | None]:
    """Return the change of a path, and the directories to compare below it.

    The workspace may be running: a path that vanishes meanwhile is retried.

    Args:
        path: the path.
        name: the last part of it.
        views: the directory that it is in.
    """
    for attempt in range(_TRIES):
        try:
            now = _resolve(views, name)
            was = _status(views.base, name)
            return _row(path, name, views, now, was), _enter(name, views, now, was)
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


def _enter(name: str, views: _Views, now: _Now, was: os.stat_result | None) -> _Views | None:
    """Enter the directories of that name, if anything below them can differ."""
    was_directory = was is not None and stat.S_ISDIR(was.st_mode)
    is_directory = now.status is not None and stat.S_ISDIR(now.status.st_mode)
    if not now.uppers and (is_directory or not was_directory):
        return None
    base = views.base if was_directory else None
    with contextlib.ExitStack() as undo:
        for walker in now.uppers if base is None else (*now.uppers, base):
            walker.down(name)
            undo.callback(walker.up)
        undo.pop_all()
    return _Views(now.uppers, base if now.through else None, base)


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
        return os.readlink(name, dir_fd=holder.fd) != os.readlink(name, dir_fd=base.fd)
    if stat.S_ISREG(status.st_mode):
        return status.st_size != was.st_size or not _same_content(holder, base, name)
    return False


def _same_content(upper: DirWalker, base: DirWalker, name: str) -> bool:
    with (
        open(os.open(name, FILE_FLAGS, dir_fd=upper.fd), "rb", buffering=0) as left_file,
        open(os.open(name, FILE_FLAGS, dir_fd=base.fd), "rb", buffering=0) as right_file,
    ):
        while (content := left_file.read(_CHUNK)) == right_file.read(_CHUNK):
            if not content:
                return True
    return False


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "device")
