"""Share one inode among equal files of all layers, by hard links into a pool of objects.

An object is named by the hash of its content and metadata (:attr:`.Entry.object`), and the files of layers are hard
links to it. An object that no layer links to is an orphan. The pool keeps a second copy (``KEY.1``) if layers of one
stack have two equal files, or if an inode has reached its maximum link count (link(2): EMLINK; 65,000 on ext4).
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
"""Minimum size in bytes of a shared file. Sharing empty files would save little, because they occupy no blocks."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of objects, in the store's directory ``objects/``.

    Attributes:
        root: path of the directory.
    """

    root: Path

    def path(self, name: str) -> Path:
        """Return the path of the object with that name."""
        return Path(self._path(name))

    def has(self, name: str) -> bool:
        """Return whether the pool has an object with that name, damaged or not."""
        return os.access(self._path(name), os.F_OK)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name[:2]}/{name}"

    def using(self, *, exclusive: bool = False) -> AbstractContextManager[None]:
        """Lock the pool while the body runs: shared for linking to objects, exclusively for removing orphans.

        Raises:
            OSError: the lock cannot be opened.
        """
        return hold_flock(self.root / ".lock", LOCK_FILE, shared=not exclusive)

    def take(self, entry: Entry, key: str, file_path: str, *, first_copy: int, temporary_folder: str) -> int | None:
        """Replace a file by a hard link to the equal object of the pool, if there is one.

        Args:
            entry: the file.
            key: the file's address (:attr:`.Entry.object`).
            file_path: path of the file in an unpublished tree; the file has no other name.
            first_copy: number of the first copy that may be used; layers of this stack already link to earlier copies.
            temporary_folder: a directory for temporary names.

        Returns:
            The number of the copy, or None if the pool has no usable copy; a damaged copy is removed from the pool.

        Raises:
            OSError: a system call failed.
        """
        for copy in itertools.count(first_copy):
            object_path = self._path(copy_name(key, copy))
            try:
                return copy if self._replace(entry, object_path, file_path, temporary_folder) else None
            except _FullInode:
                continue
        raise AssertionError("copies are counted without an end")

    def share(self, entry: Entry, key: str, file_path: str, *, first_copy: int, temporary_folder: str) -> int:
        """Add a file to the pool, or replace the file by a link if another process has added an equal object first.

        Args:
            entry: the file; its content is already synced to disk.
            key: the file's address (:attr:`.Entry.object`).
            file_path: path of the file in an unpublished tree; the file has no other name.
            first_copy: number of the first copy that the file may become; layers of this stack already link to earlier
                copies.
            temporary_folder: a directory for temporary names.

        Returns:
            The number of the copy, or :data:`.entries.PRIVATE` if the inode has reached its maximum link count.

        Raises:
            OSError: a system call failed.
        """
        for copy in itertools.count(first_copy):
            object_path = self._path(copy_name(key, copy))
            try:
                while not self._add(file_path, object_path) and not self._replace(
                    entry, object_path, file_path, temporary_folder
                ):
                    pass  # the pool's object was damaged, and _replace has removed it
            except _FullInode:
                continue
            except OSError as error:
                if error.errno == errno.EMLINK:
                    return PRIVATE
                raise
            return copy
        raise AssertionError("copies are counted without an end")

    def _add(self, file_path: str, object_path: str) -> bool:
        """Add a file to the pool; return False if the pool already has an object with this name."""
        try:
            os.link(file_path, object_path, follow_symlinks=False)
        except FileExistsError:
            return False
        except FileNotFoundError:  # the object's subdirectory does not exist yet
            folder = os.path.dirname(object_path)
            if os.path.isdir(folder):
                raise
            os.makedirs(folder, mode=0o700, exist_ok=True)
            return self._add(file_path, object_path)
        return True

    def _replace(self, entry: Entry, object_path: str, file_path: str, temporary_folder: str) -> bool:
        """Replace a file by a link to an object; return False if the object is missing or was damaged and removed."""
        try:
            status = os.lstat(object_path)
        except FileNotFoundError:
            return False
        if not looks_like(entry, status):
            with suppress(FileNotFoundError):
                os.unlink(object_path)  # layers with this damaged inode keep it; `image verify` reports them
            return False
        # Do not rename(2) over the file: ext4 would then write the data to disk at once (auto_da_alloc), 2 ms per file.
        replaced_path = f"{temporary_folder}/aside"
        os.rename(file_path, replaced_path)
        try:
            os.link(object_path, file_path, follow_symlinks=False)
        except OSError as error:
            os.rename(replaced_path, file_path)
            if error.errno == errno.EMLINK:
                raise _FullInode from error
            raise
        os.unlink(replaced_path)
        return True

    def shards(self) -> list[Path]:
        """Return the pool's subdirectories; each is named by the first two digits of its objects."""
        return sorted(path for path in self.root.iterdir() if len(path.name) == 2)

    def orphans(self, *, lock: bool = True) -> Iterator[tuple[str, os.stat_result]]:
        """Yield (path, status) of each object that no layer links to.

        Args:
            lock: whether to lock the pool exclusively while listing the orphans of each subdirectory.

        Raises:
            OSError: a system call failed.
        """
        for shard in self.shards():
            with self.using(exclusive=True) if lock else nullcontext(), os.scandir(shard) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink == 1:
                        yield entry.path, status

    def remove_orphans(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove the objects that no layer links to.

        Args:
            dry_run: only count the orphans.

        Returns:
            The number of orphans, and their bytes on disk.

        Raises:
            OSError: a system call failed.
        """
        count = size = 0
        for path, status in self.orphans():
            count, size = count + 1, size + status.st_blocks * 512
            if not dry_run:
                os.unlink(path)
        return count, size


class _FullInode(Exception):
    """The inode has reached its maximum link count (EMLINK)."""


def looks_like(entry: Entry, status: os.stat_result) -> bool:
    """Return whether an inode is a regular file with the size, mode, owner and mtime of the entry."""
    return stat.S_ISREG(status.st_mode) and (
        (status.st_size, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)
        == (entry.size, entry.mode, entry.uid, entry.gid, entry.mtime)
    )
