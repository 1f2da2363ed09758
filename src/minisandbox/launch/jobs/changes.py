"""List the changes of a workspace by comparing its uppers with the image, inside a second sandbox.

The root directory of the second sandbox holds ``trees/N`` (the uppers, topmost first), ``base`` (the image) and, if
``/usr`` was writable, ``base-usr``. An agent may have written the uppers, so they are opened component by component and
no link is followed. In an upper, device 0/0 marks a deleted path and the attribute ``user.overlay.opaque`` a replaced
directory (overlayfs.rst).
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
"""Limit for all paths together, because a long directory name repeats in the path of every file below it."""
_TRIES = 16
"""Attempts to compare a path that keeps vanishing."""
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_CHUNK = 1 << 16
_MOST_OPEN = 1000
"""Directories that are kept open, so that the comparison survives if the workspace moves them."""
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

    The request has ``trees`` (the number of uppers), ``usr`` (whether /usr was writable), ``below`` (the path to
    compare), ``skip`` (paths that exist only as mount points) and ``characters`` (the limit for all paths together).
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
    """One directory of the workspace, as walkers that have entered it in each tree that contains it.

    Attributes:
        uppers: walkers of the uppers that contain the directory, topmost first.
        below: walker of the image if the image's directory is visible through the uppers, or None.
        base: walker of the image if the image contains the directory, visible or not, or None.
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
    """The current state of a path.

    Attributes:
        status: its lstat(2), or None if it is deleted.
        holder: walker of the topmost tree that contains the path.
        uppers: for a directory, walkers of the uppers that are merged in it.
        through: whether the image's directory is visible through the uppers.
    """

    status: os.stat_result | None
    holder: DirWalker | None = None
    uppers: tuple[DirWalker, ...] = ()
    through: bool = False


@dataclass(slots=True)
class _Level:
    """A directory under comparison.

    Attributes:
        prefix: its path, with a trailing slash.
        views: walkers in the directory.
        names: entries still to compare, in reverse order.
    """

    prefix: str
    views: _Views
    names: list[str]

    @classmethod
    def of(cls, prefix: str, views: _Views, below: str) -> _Level:
        names = _names(views)
        if below.startswith(prefix) and below != prefix:  # an ancestor of ``below``: follow its path only
            names &= {below[len(prefix) :].split("/", maxsplit=1)[0]}
        return cls(prefix, views, sorted(names, reverse=True))


def _changes_below(prefix: str, views: _Views, below: str) -> Iterator[Row]:
    """Compare everything below a directory, without recursion and with few open files."""
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
    if views.base is not views.below and views.base is not None:  # replaced: the image's entries may be deleted
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
    """Return the change of a path and, for a directory, the walkers to continue with below it.

    A path that vanishes is retried, because the workspace may be running.

    Args:
        path: the path.
        name: its last component.
        views: walkers in the directory that contains it.
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
    """Enter the directory in every tree that contains it; return None if nothing below it can differ."""
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
