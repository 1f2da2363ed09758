"""Directories of fake sandboxes: copied, compared, removed. For trees of one's own tests; nothing here is defended."""

from __future__ import annotations

import filecmp
import os
import stat
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from minisandbox.errors import HostError
from minisandbox.sandbox.filecalls import FILE_TYPES
from minisandbox.sandbox.scratch import new_scratch
from minisandbox.store.trees import remove_tree
from minisandbox.types import Change, ChangeKind, FileType


class Copy:
    """A copy of a tree, which is removed with the last that holds it.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._remove = weakref.finalize(self, remove, path, os.getpid())

    @classmethod
    def of(cls, *sources: Path) -> Copy:
        """Copy directories over each other; those that do not exist are left out."""
        copy = cls(new_scratch())
        copy.path.chmod(0o755)
        for source in sources:
            if source.is_dir():
                _copy(source, copy.path)
        return copy

    def restore(self, target: Path) -> None:
        """Make a directory the same as this copy, in its place."""
        remove(target)
        target.mkdir()
        _copy(self.path, target)


def _copy(source: Path, target: Path) -> None:
    done = subprocess.run(
        ["cp", "-a", "--", f"{source}/.", f"{target}/"], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise HostError(f"cannot copy {source}: {done.stderr.decode(errors='replace').strip()}")


def remove(path: Path, maker: int | None = None) -> None:
    """Remove a tree, unless this process is a fork of its maker."""
    if maker is None or maker == os.getpid():
        remove_tree(path)


def compare(before: Path, after: Path, shown: PurePosixPath) -> Iterator[Change]:
    """What differs between two trees, sorted by path.

    Args:
        before: as it was.
        after: as it is.
        shown: the path that stands for both in the answer.
    """
    yield from sorted(_compare(before, after, shown), key=lambda change: change.path)


def _compare(before: Path, after: Path, shown: PurePosixPath) -> Iterator[Change]:
    old, new = _entries(before), _entries(after)
    for name in old.keys() | new.keys():
        was, now, path = old.get(name), new.get(name), shown / name
        if now is None and was is not None:
            yield Change(path, ChangeKind.DELETED, _type(was))
        elif was is None and now is not None:
            yield Change(path, ChangeKind.ADDED, _type(now))
        elif was is not None and now is not None and _differs(before / name, after / name, was, now):
            yield Change(path, ChangeKind.MODIFIED, _type(now))
        if any(status is not None and stat.S_ISDIR(status.st_mode) for status in (was, now)):
            yield from _compare(before / name, after / name, path)


def _entries(directory: Path) -> dict[str, os.stat_result]:
    """What lies in a directory; nothing if it is none, or has gone meanwhile."""
    found: dict[str, os.stat_result] = {}
    try:
        names = os.listdir(directory) if not directory.is_symlink() else []
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in names:
        try:
            found[name] = (directory / name).lstat()
        except FileNotFoundError:  # removed since it was listed
            continue
    return found


def _type(status: os.stat_result) -> FileType:
    return FILE_TYPES[stat.S_IFMT(status.st_mode)]


def _differs(before: Path, after: Path, was: os.stat_result, now: os.stat_result) -> bool:
    if (was.st_mode, was.st_uid, was.st_gid) != (now.st_mode, now.st_uid, now.st_gid):
        return True
    if stat.S_ISLNK(now.st_mode):
        return os.readlink(before) != os.readlink(after)
    if stat.S_ISREG(now.st_mode):
        return was.st_size != now.st_size or not filecmp.cmp(before, after, shallow=False)
    return False
