"""The pool of objects: one inode for equal files of all layers, by hard links.

A name in the pool is the hash of all that its inode holds (:attr:`.Entry.object`). Layers hold further names of
that inode; one that only the pool names is an orphan. A copy (``KEY.1``) is there where a layer must not have the same
inode twice, or an inode can take no further name (link(2): EMLINK; 65,000 on ext4).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from minisandbox.store.disk.locks import LOCK_FILE, hold_flock
from minisandbox.store.entries import PRIVATE, Entry, copy_name

SMALLEST = 1
"""Bytes below which a file is not shared: an empty one takes nothing but its inode."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The directory ``objects/``.

    Attributes:
        root: its path.
    """

    root: Path

    def path(self, name: str) -> Path:
        """Return where an object of that name lies."""
        return Path(self._path(name))

    def has(self, name: str) -> bool:
        """Return whether an object of that name exists, damaged or not."""
        return os.path.lexists(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name[:2]}/{name}"

    def using(self, *, exclusive: bool = False) -> AbstractContextManager[None]:
        """Keep orphans from being removed while the body takes them up; or, exclusively, keep them from being taken.

        Raises:
            OSError: the lock cannot be opened.
        """
        return hold_flock(self.root / ".lock", LOCK_FILE, shared=not exclusive)

    def take(self, entry: Entry, key: str, name: str, *, first: int, spare: Path) -> int | None:
        """Replace a file by the pool's inode, if it is there.

        Args:
            entry: the file.
            key: its address (:attr:`.Entry.object`).
            name: its only name, in a tree that is not published yet.
            first: the first of the object's copies that may be used.
            spare: a directory for a moment's names.

        Returns:
            Which copy it is; None if the pool has none that could be used (one that was damaged is gone then).

        Raises:
            OSError: the kernel refused.
        """
        for copy in itertools.count(first):
            path = self._path(copy_name(key, copy))
            try:
                return copy if self._take(entry, path, name, spare) else None
            except _FullInode:
                continue
        raise AssertionError("copies are counted without an end")

    def share(self, entry: Entry, key: str, name: str, *, first: int, spare: Path) -> int:
        """Give the pool a file's inode; if another process was faster, replace the file by the pool's.

        Args:
            entry: the file; its content is durable.
            key: its address (:attr:`.Entry.object`).
            name: its only name, in a tree that is not published yet.
            first: the first of the object's copies that it may become.
            spare: a directory for a moment's names.

        Returns:
            Which copy it is; :data:`.entries.PRIVATE` if its inode can take no further name.

        Raises:
            OSError: the kernel refused.
        """
        for copy in itertools.count(first):
            path = self._path(copy_name(key, copy))
            try:
                with suppress(_FullInode):
                    while not self._given(name, path) and not self._take(entry, path, name, spare):
                        pass  # the pool's inode was damaged and is gone now
                    return copy
            except OSError as error:
                if error.errno == errno.EMLINK:
                    return PRIVATE
                raise
        raise AssertionError("copies are counted without an end")

    def _given(self, name: str, path: str) -> bool:
        """Return whether this call added an inode that the pool did not have."""
        try:
            try:
                _link(name, path)
            except FileNotFoundError:  # the first object of its directory
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                _link(name, path)
        except FileExistsError:
            return False
        return True

    def _take(self, entry: Entry, path: str, name: str, spare: Path) -> bool:
        """Replace a file by the pool's inode; False if that has gone or was damaged, and now is gone."""
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return False
        if not looks_like(entry, info):
            with suppress(FileNotFoundError):
                os.unlink(path)  # layers that have this inode keep it; verify finds them
            return False
        # Not by rename(2) over the file: ext4 then writes back the replaced file (auto_da_alloc), 2 ms each.
        aside = f"{spare}/aside"
        os.rename(name, aside)
        try:
            _link(path, name)
        except OSError as error:
            os.rename(aside, name)
            if error.errno == errno.EMLINK:
                raise _FullInode from error
            raise
        os.unlink(aside)
        return True

    def shards(self) -> list[Path]:
        """Return the pool's directories."""
        return sorted(path for path in self.root.iterdir() if len(path.name) == 2)

    def orphans(self, *, alone: bool = True) -> Iterator[tuple[str, os.stat_result]]:
        """Yield where each object lies that no layer has, and its status.

        Args:
            alone: whether to lock each object's directory until the next object is requested.

        Raises:
            OSError: the kernel refused.
        """
        for shard in self.shards():
            with self.using(exclusive=True) if alone else nullcontext(), os.scandir(shard) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    if info.st_nlink == 1:
                        yield entry.path, info

    def remove_orphans(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove the objects that no layer has.

        Args:
            dry_run: only count them.

        Returns:
            How many they were, and the bytes that they took.

        Raises:
            OSError: the kernel refused.
        """
        count = size = 0
        for path, info in self.orphans():
            count, size = count + 1, size + info.st_blocks * 512
            if not dry_run:
                os.unlink(path)
        return count, size


class _FullInode(Exception):
    """An inode that takes no further name."""


def _link(source: str, target: str) -> None:
    os.link(source, target, follow_symlinks=False)


def looks_like(entry: Entry, info: os.stat_result) -> bool:
    """Return whether an inode has the type, size, mode, owner and mtime of a file's entry."""
    return stat.S_ISREG(info.st_mode) and (
        (info.st_size, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns)
        == (entry.size, entry.mode, entry.uid, entry.gid, entry.mtime)
    )
