"""List the changes of a workspace by comparing its uppers with the image, inside a second sandbox.

The root directory of the second sandbox holds ``trees/N`` (the uppers, topmost first), ``base`` (the image) and, if
``/usr`` was writable, ``base-usr``. An agent may have written the uppers, so they are opened component by component and
no link is followed. In an upper, device 0/0 marks a deleted path and the attribute ``user.overlay.opaque`` a replaced
directory (overlayfs.rst).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from minisandbox.launch.kernel import syscalls as sc

from .frames import integer
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
"""One change: path, kind of change, kind of file."""
_SKIPPED = frozenset({".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox", "node_modules"})
"""Names whose files never belong to the patch of a turn."""
_TICK = 50_000_000
"""Nanoseconds after a write in which a second write may leave the time stamps unchanged (kernel ticks)."""


def serve(job: WorkerJob) -> None:
    """Answer a ``changes`` request: frames of rows, then ``end``.

    The request has ``trees`` (the number of uppers), ``usr`` (whether /usr was writable), ``below`` (the path to
    compare), ``skip`` (paths that exist only as mount points) and ``characters`` (the limit for all paths together).
    """
    if "content" in job.request:
        _serve_contents(job)
        return
    tree_count, compared_path = integer(job.request, "trees"), str(job.request["below"])
    skipped_paths = job.request["skip"]
    max_characters = min(integer(job.request, "characters"), MOST_CHARACTERS)
    assert isinstance(skipped_paths, list)
    try:
        changes = _all_changes(tree_count, compared_path, has_usr=bool(job.request["usr"]))
        for page in _pages((row for row in changes if row[0] not in skipped_paths), max_characters):
            job.send({"event": "changes", "rows": page})
        job.send({"event": "end"})
    except OSError as error:
        job.fail(error, "compare", error.filename or "/")


def _serve_contents(job: WorkerJob) -> None:
    """Answer a request for file contents: a frame per file that changed since the last request, then ``end``.

    The request's payload contains the mark of each file that was sent before. If a file still has that mark, only its
    path is sent, in the payload of the last frame. ``content`` is the maximum size of a file, and ``characters`` the
    limit for all paths together.
    """
    reader = _ContentReader(job, json.loads(job.payload or b"{}"), integer(job.request, "content"))
    uppers = [f"trees/{number}/upper" for number in range(integer(job.request, "trees"))]
    files = _compare_all("base", uppers, "/", str(job.request["below"]), reader.compare)
    try:
        for _ in _pages(files, integer(job.request, "characters")):
            pass
        job.send({"event": "end"}, json.dumps(reader.unchanged).encode())
    except OSError as error:
        job.fail(error, "compare", error.filename or "/")


class _ContentReader:
    """Sends the contents of files whose marks have changed.

    Args:
        job: the job.
        marks: the marks of the files that were sent before.
        max_size: the maximum size of a file whose content is sent.

    Attributes:
        unchanged: the paths of files that still have their mark.
    """

    def __init__(self, job: WorkerJob, marks: dict[str, list[int]], max_size: int) -> None:
        self._job, self._marks, self._max_size = job, marks, max_size
        self.unchanged: list[str] = []

    def compare(self, path: str, name: str, views: _Views) -> tuple[Row | None, _Views | None]:
        """Compare a path like :func:`_compare`, but send files instead of comparing their contents."""
        if name in _SKIPPED or name.endswith(".pyc"):
            return None, None
        return _compare(path, name, views, self._send_file)

    def _send_file(
        self, path: str, name: str, views: _Views, current: _Current, base_status: os.stat_result | None
    ) -> Row | None:
        """Send a file; return a row, so that its path counts against the limit."""
        if not (_is_content(current.status) or _is_content(base_status)) or current.walker is views.base is not None:
            return None
        mark = _mark(current.status)
        if mark is not None and self._marks.get(path) == mark:
            self.unchanged.append(path)
        else:
            new = self._read(current.walker, name, current.status)
            old = self._read(views.base, name, base_status)
            header = {
                "event": "file",
                "path": path,
                "mark": mark,
                "new": _mode(current.status),
                "old": _mode(base_status),
            }
            sizes = [-1 if content is None else len(content) for content in (new, old)]
            self._job.send({**header, "sizes": sizes}, (new or b"") + (old or b""))
        return path, "modified", "file"

    def _read(self, walker: DirWalker | None, name: str, status: os.stat_result | None) -> bytes | None:
        """Return the content of a file or the target of a symbolic link, or None if the file is too large."""
        if status is None or walker is None or not _is_content(status):
            return b""
        if stat.S_ISLNK(status.st_mode):
            return os.fsencode(os.readlink(name, dir_fd=walker.fd))
        with open(os.open(name, FILE_FLAGS, dir_fd=walker.fd), "rb", buffering=0) as file:
            content = file.read(self._max_size + 1)
        return content if len(content) <= self._max_size else None


def _is_content(status: os.stat_result | None) -> bool:
    return status is not None and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode))


def _mode(status: os.stat_result | None) -> int:
    """Return the mode that git records for a file or symbolic link, or 0 for any other kind."""
    if status is None or not _is_content(status):
        return 0
    return 0o120000 if stat.S_ISLNK(status.st_mode) else 0o100755 if status.st_mode & 0o100 else 0o100644


def _mark(status: os.stat_result | None) -> list[int] | None:
    """Return numbers that change with every write to a file, or None if a write just now may leave them unchanged."""
    if status is None:
        return [0]
    if time.time_ns() - status.st_ctime_ns < _TICK:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _pages(rows: Iterable[Row], max_characters: int) -> Iterator[list[Row]]:
    page: list[Row] = []
    count = size = page_size = 0
    for row in rows:
        page.append(row)
        page_size += len(row[0])
        count, size = count + 1, size + len(row[0])
        if count > _MOST_ROWS or size > max_characters:
            raise OSError(errno.EFBIG, f"more than {_MOST_ROWS} changes, or {max_characters} characters of paths")
        if len(page) >= _ROWS or page_size > _PAGE_SIZE:
            yield page
            page, page_size = [], 0
    if page:
        yield page


def _all_changes(tree_count: int, compared_path: str, *, has_usr: bool) -> Iterator[Row]:
    trees = [f"trees/{number}" for number in range(tree_count)]
    yield from _compare_all("base", [f"{tree}/upper" for tree in trees], "/", compared_path)
    if has_usr:
        yield from _compare_all("base-usr", [f"{tree}/usr" for tree in trees], "/usr/", compared_path)


def _compare_all(
    base: str, uppers: list[str], prefix: str, compared_path: str, compare: Compare | None = None
) -> Iterator[Row]:
    keep_open = _MOST_OPEN // (len(uppers) + 1)
    with contextlib.ExitStack() as stack:
        walkers = [
            stack.enter_context(contextlib.closing(DirWalker(os.open(path, DIRECTORY_FLAGS), keep_open)))
            for path in (base, *uppers)
        ]
        yield from _changes_below(
            prefix, _Views(tuple(walkers[1:]), walkers[0], walkers[0]), compared_path, compare or _compare
        )


@dataclass(frozen=True, slots=True)
class _Views:
    """Walkers that have entered one directory of the workspace, one for each tree that contains the directory.

    Attributes:
        uppers: walkers of the uppers that contain the directory, topmost first.
        visible_base: walker of the image if the image's directory is visible through the uppers, or None.
        base: walker of the image if the image contains the directory, visible or not, or None.
    """

    uppers: tuple[DirWalker, ...]
    visible_base: DirWalker | None
    base: DirWalker | None

    def leave(self) -> None:
        """Return to the directory above.

        Raises:
            OSError: a directory was moved (ESTALE).
        """
        for walker in self.uppers if self.base is None else (*self.uppers, self.base):
            walker.up()


@dataclass(frozen=True, slots=True)
class _Current:
    """The current state of a path.

    Attributes:
        status: its lstat(2), or None if it is deleted.
        walker: walker of the topmost tree that contains the path.
        uppers: for a directory, walkers of the uppers that are merged in it.
        shows_base: whether the image's directory is visible through the uppers.
    """

    status: os.stat_result | None
    walker: DirWalker | None = None
    uppers: tuple[DirWalker, ...] = ()
    shows_base: bool = False


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
    def of(cls, prefix: str, views: _Views, compared_path: str) -> _Level:
        names = _names(views)
        if compared_path.startswith(prefix) and compared_path != prefix:  # follow only the compared path
            names &= {compared_path[len(prefix) :].split("/", maxsplit=1)[0]}
        return cls(prefix, views, sorted(names, reverse=True))


Compare = Callable[[str, str, _Views], tuple[Row | None, _Views | None]]
"""A function like :func:`_compare`."""
Describe = Callable[[str, str, _Views, _Current, os.stat_result | None], Row | None]
"""A function like :func:`_row`."""


def _changes_below(prefix: str, views: _Views, compared_path: str, compare: Compare) -> Iterator[Row]:
    """Compare everything below a directory, without recursion and with few open files."""
    levels = [_Level.of(prefix, views, compared_path)]
    while True:
        level = levels[-1]
        if level.names:
            name = level.names.pop()
            row, child_views = compare(level.prefix + name, name, level.views)
            if row is not None:
                yield row
            if child_views is not None:
                levels.append(_Level.of(f"{level.prefix}{name}/", child_views, compared_path))
        elif len(levels) == 1:
            return
        else:
            levels.pop().views.leave()


def _names(views: _Views) -> set[str]:
    names: set[str] = set()
    for upper in views.uppers:
        names.update(os.listdir(upper.fd))
    if views.base is not views.visible_base and views.base is not None:  # the directory was replaced
        names.update(os.listdir(views.base.fd))
    return names


def _resolve(views: _Views, name: str) -> _Current:
    """Return the current state of a directory entry by merging the trees, as overlayfs does."""
    topmost: _Current | None = None
    merged: list[DirWalker] = []
    for upper in views.uppers:
        status = _status(upper, name)
        if status is None:
            continue
        if not stat.S_ISDIR(status.st_mode):
            if topmost is None:
                return _Current(None) if _is_whiteout(status) else _Current(status, upper)
            return _Current(topmost.status, topmost.walker, tuple(merged), shows_base=False)
        topmost = topmost or _Current(status, upper)
        merged.append(upper)
        if _is_opaque(upper, name):
            return _Current(topmost.status, topmost.walker, tuple(merged), shows_base=False)
    base_status = _status(views.visible_base, name)
    if topmost is None:
        return _Current(base_status, views.visible_base)
    shows_base = base_status is not None and stat.S_ISDIR(base_status.st_mode)
    return _Current(topmost.status, topmost.walker, tuple(merged), shows_base=shows_base)


def _status(walker: DirWalker | None, name: str) -> os.stat_result | None:
    try:
        return None if walker is None else os.stat(name, dir_fd=walker.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(upper: DirWalker, name: str) -> bool:
    with sc.closing(os.open(name, DIRECTORY_FLAGS, dir_fd=upper.fd)) as directory:
        try:
            return os.getxattr(directory, _OPAQUE) == b"y"
        except OSError:
            return False


def _compare(path: str, name: str, views: _Views, describe: Describe | None = None) -> tuple[Row | None, _Views | None]:
    """Return the change of a path and, for a directory, the walkers to continue with below it.

    A path that vanishes is retried, because the workspace may be running.

    Args:
        path: the path.
        name: its last component.
        views: walkers in the directory that contains it.
        describe: returns the change; None for :func:`_row`.
    """
    describe = describe or _row
    for attempt in range(_TRIES):
        try:
            current = _resolve(views, name)
            base_status = _status(views.base, name)
            return describe(path, name, views, current, base_status), _enter(name, views, current, base_status)
        except OSError as error:
            if error.errno not in _VANISHED or attempt == _TRIES - 1:
                raise OSError(error.errno, error.strerror, path) from error
    raise AssertionError


def _row(path: str, name: str, views: _Views, current: _Current, base_status: os.stat_result | None) -> Row | None:
    status = current.status
    if status is None:
        return None if base_status is None else (path, "deleted", _kind(base_status))
    if base_status is None:
        return path, "added", _kind(status)
    return (path, "modified", _kind(status)) if _differs(current, name, views, base_status) else None


def _enter(name: str, views: _Views, current: _Current, base_status: os.stat_result | None) -> _Views | None:
    """Enter the directory in every tree that contains it; return None if nothing below it can differ."""
    base_is_directory = base_status is not None and stat.S_ISDIR(base_status.st_mode)
    is_directory = current.status is not None and stat.S_ISDIR(current.status.st_mode)
    if not current.uppers and (is_directory or not base_is_directory):
        return None
    base = views.base if base_is_directory else None
    with contextlib.ExitStack() as stack:
        for walker in current.uppers if base is None else (*current.uppers, base):
            walker.down(name)
            stack.callback(walker.up)
        stack.pop_all()
    return _Views(current.uppers, base if current.shows_base else None, base)


def _differs(current: _Current, name: str, views: _Views, base_status: os.stat_result) -> bool:
    status, walker, base = current.status, current.walker, views.base
    assert status is not None
    assert walker is not None
    assert base is not None
    if walker is base:
        return False
    if (status.st_mode, status.st_uid, status.st_gid) != (base_status.st_mode, base_status.st_uid, base_status.st_gid):
        return True
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(name, dir_fd=walker.fd) != os.readlink(name, dir_fd=base.fd)
    if stat.S_ISREG(status.st_mode):
        return status.st_size != base_status.st_size or not _same_content(walker, base, name)
    return False


def _same_content(upper: DirWalker, base: DirWalker, name: str) -> bool:
    with (
        open(os.open(name, FILE_FLAGS, dir_fd=upper.fd), "rb", buffering=0) as upper_file,
        open(os.open(name, FILE_FLAGS, dir_fd=base.fd), "rb", buffering=0) as base_file,
    ):
        while (content := upper_file.read(_CHUNK)) == base_file.read(_CHUNK):
            if not content:
                return True
    return False


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "device")
