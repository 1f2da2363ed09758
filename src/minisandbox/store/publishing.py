"""Publish a finished tree as a layer: list its files, share equal files with other layers, sync it and rename it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.store import entries as listing
from minisandbox.store.disk.durable import sync_directory, sync_filesystem
from minisandbox.store.disk.scanning import Allowance, scan
from minisandbox.store.entries import FILE, PRIVATE, Entry, list_digest
from minisandbox.store.objects import SMALLEST, Pool
from minisandbox.store.records import LayerRecord


@dataclass(frozen=True, slots=True)
class Made:
    """Result of a build step: a finished tree that the store can publish as a layer.

    Attributes:
        tree: the finished tree, inside the working directory of the build step.
        facts: facts that the build step collected, for the layer's record.
        seconds: build time on another machine; None if the tree was built here.
        patience: maximum seconds for listing and hashing the tree; None sets no limit.
        digests: SHA-256 of the contents of files that the build step has already hashed, by inode.
        plain: inodes of those of these files that have no extended attributes.
        expected: the :func:`.entries.list_digest` that the tree must have; "" if it is unknown.
    """

    tree: Path
    facts: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    patience: float | None = None
    digests: Mapping[int, str] = field(default_factory=dict)
    plain: Collection[int] = frozenset()
    expected: str = ""


@dataclass(slots=True)
class Publication:
    """Prepare one layer for publication.

    Attributes:
        pool: the pool of objects to share files with.
        work: the private directory that holds the tree.
        output: the tree and its facts.
        below: returns, for SHA-256 of contents, the names of their pool objects in the layers that this layer is
            stacked with. A stack must not contain an inode twice, because programs compare inodes. The names are read
            only if the pool has an object that is equal to a file of this layer.
        copies: for a frozen layer that is unpacked, the earlier copy number of each shared file, by path.
    """

    pool: Pool
    work: Path
    output: Made
    below: Callable[[frozenset[bytes]], Iterable[str]]
    copies: Mapping[str, int] = field(default_factory=dict)
    _linked: set[str] = field(default_factory=set)
    _missing: list[tuple[Entry, str]] = field(default_factory=list)
    _next: dict[str, int] = field(default_factory=dict)
    _digests: frozenset[bytes] = frozenset()
    _read_below: bool = False
    _tree: Path = Path()
    _spare: str = ""  # path of a directory for temporary names

    def prepare(self, unsized: LayerRecord) -> tuple[Path, LayerRecord]:
        """Prepare the layer's directory, so that one rename can publish it.

        The layer is synced before its files are added to the pool, so that a crash leaves no incomplete objects.
        The pool's own links need no sync: :func:`.verify.verify` restores those that a crash has lost.

        Args:
            unsized: the layer's record, without sizes.

        Returns:
            The directory to rename, and the layer's complete record.

        Raises:
            UnfitTree: the tree takes too long to read, or a path in it is too long.
            StoreError: the tree contains a device, or does not have the expected digest.
            OSError: a system call failed; with delayed allocation, the kernel reports ENOSPC only here.
        """
        self._spare = f"{self.work}/spare"
        os.mkdir(self._spare, mode=0o700)
        layer = self.work / "publish"
        layer.mkdir(mode=0o700)
        self._tree = layer / "tree"
        rename_directory(self.output.tree, self._tree)
        with ExitStack() as restore_modes:
            entries = self._list_files(restore_modes)
            with self.pool.using():
                self._replace_files(entries)
                self._restore_mtimes(entries)
                record = _write_records(layer, unsized, entries)
                sync_filesystem(layer)
                is_changed = self._add_objects()
            is_changed |= self._restore_mtimes(entries)
        if is_changed or not all(entry.mode & stat.S_IRWXU == stat.S_IRWXU for entry in _directories(entries)):
            _write_records(layer, unsized, entries)
            sync_filesystem(layer)
        return layer, record

    def _list_files(self, restore_modes: ExitStack) -> list[Entry]:
        output = self.output
        entries = list(scan(self._tree, restore_modes, Allowance(output.patience), output.digests, output.plain))
        if output.expected and list_digest(entries) != output.expected:
            raise StoreError("the files of a layer are not those of its list", reason="its content was changed")
        self._linked = {entry.same for entry in entries if entry.same}
        return entries

    def _replace_files(self, entries: list[Entry]) -> None:
        """Replace files by links to equal pool objects, before the sync, so that duplicates are not written to disk."""
        shared = [entry for entry in entries if self._is_shared(entry)]
        self._digests = frozenset(entry.digest.encode() for entry in shared)
        for entry in shared:
            key, copy = entry.object, None
            if self.pool.has(key):
                first_copy = self.copies.get(entry.path, self._first_copy(key))
                copy = self.pool.take(
                    entry, key, self._path_of(entry), first_copy=first_copy, temporary_folder=self._spare
                )
            if copy is None:
                self._missing.append((entry, key))
                copy = self.copies.get(entry.path, self._next.get(key, 0))
            entry.copy = copy
            self._next[key] = max(self._next.get(key, 0), copy + 1)

    def _add_objects(self) -> bool:
        """Add to the pool the files that it has no equal object of; return whether a file got another copy number."""
        moved: dict[str, int] = {}
        for entry, key in self._missing:
            first_copy = max(entry.copy, moved.get(key, 0))
            path = self._path_of(entry)
            copy = self.pool.share(entry, key, path, first_copy=first_copy, temporary_folder=self._spare)
            if copy != entry.copy:
                entry.copy = copy
                moved[key] = copy + 1
        return bool(moved)

    def _path_of(self, entry: Entry) -> str:
        return f"{self._tree}/{entry.path}"

    def _is_shared(self, entry: Entry) -> bool:
        """Return whether the pool may share a file; never if it is hard-linked, because programs read link counts."""
        is_linked = entry.same or entry.path in self._linked
        return entry.kind == FILE and entry.size >= SMALLEST and not is_linked

    def _first_copy(self, key: str) -> int:
        """Return the number of the object's first copy that this layer and the layers below do not use."""
        if not self._read_below:
            self._read_below = True
            for object_name in self.below(self._digests):
                object_key, _, copy = object_name.partition(".")
                self._next[object_key] = max(self._next.get(object_key, 0), int(copy or 0) + 1)
        return self._next.get(key, 0)

    def _restore_mtimes(self, entries: list[Entry]) -> bool:
        """Restore the mtimes of directories that replaced files have changed; return whether there are any."""
        is_changed = False
        for entry in _directories(entries):
            path = self._path_of(entry)
            if os.lstat(path).st_mtime_ns != entry.mtime:
                os.utime(path, ns=(entry.mtime, entry.mtime), follow_symlinks=False)
                is_changed = True
        return is_changed


def _directories(entries: list[Entry]) -> Iterator[Entry]:
    return (entry for entry in entries if entry.kind == listing.DIRECTORY)


def _write_records(layer: Path, unsized: LayerRecord, entries: list[Entry]) -> LayerRecord:
    """Write a layer's file list and its record with the sizes; return the record."""
    (layer / listing.NAME).unlink(missing_ok=True)
    listing.write_entries(layer / listing.NAME, entries)
    file_count = sum(entry.kind != listing.DIRECTORY for entry in entries)
    # Exclude the root directory (path ""), to be consistent with the sizes of layers of older versions.
    size = sum(entry.disk for entry in entries if not entry.same and entry.path)
    record = replace(unsized, bytes=size, files=file_count)
    (layer / "layer.json").write_bytes(record.to_json())
    return record


def rename_directory(source: Path, target: Path) -> None:
    """Rename a directory; make it writable meanwhile, because rename(2) needs permission to update its ".." entry."""
    mode = stat.S_IMODE(source.lstat().st_mode)
    if os.access(source, os.W_OK):
        source.rename(target)
        return
    source.chmod(mode | stat.S_IWUSR)
    source.rename(target)
    target.chmod(mode)


def make_visible(layer: Path, target: Path) -> None:
    """Publish a prepared layer by a single rename, so that no process ever sees an incomplete layer.

    Raises:
        OSError: a system call failed; the layer is not published.
    """
    layer.rename(target)
    sync_directory(target.parent)


def objects_of(layers: Iterable[Path], digests: frozenset[bytes]) -> Iterator[str]:
    """Yield the names of the pool objects in the lists of layers.

    Args:
        layers: directories of the layers; a removed layer is skipped.
        digests: SHA-256 of the contents of the requested objects.

    Raises:
        StoreError: a list is damaged.
    """
    for layer in layers:
        try:
            for entry in listing.read_entries(layer, digests):
                if entry.copy != PRIVATE:
                    yield entry.object_name
        except FileNotFoundError:
            continue
