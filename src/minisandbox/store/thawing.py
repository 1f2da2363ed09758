"""Frozen layers: without a tree, their files' contents in packs; and how the next use gives them their tree back.

A frozen layer keeps its record, the list of its files and the marker ``frozen``. Its files are objects of the pool that
other layers have too, or that nobody packed yet, and contents of packs. The tree comes back by one rename, so whoever
dies on the way leaves the layer as it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.store import entries as listing
from minisandbox.store.durable import sync_directory, sync_filesystem
from minisandbox.store.entries import DIRECTORY, FILE, Entry
from minisandbox.store.faults import disk_full, fault_point, store_faults
from minisandbox.store.growing import Growth, write_content
from minisandbox.store.locks import hold_lock
from minisandbox.store.objects import Pool, looks_like
from minisandbox.store.packs import Pack, Packs, damaged_pack
from minisandbox.store.places import is_read_only, set_aside
from minisandbox.store.staging import Staging

MARKER = "frozen"
_TIMEOUT = 3600.0


def is_frozen(layer: Path) -> bool:
    """Whether a layer is frozen; where both the marker and the tree are there, the tree is whole.

    Args:
        layer: its directory.
    """
    return (layer / MARKER).exists() and not (layer / "tree").exists()


def thaw(layer: Path) -> None:
    """Give a frozen layer its tree back; of several that want it one does so, the others wait.

    The caller holds the layer, so that nobody freezes or removes it meanwhile.

    Args:
        layer: its directory.

    Raises:
        StoreError: the store is read-only; or the layer is damaged, and lies in quarantine now.
        DiskFull: the disk is full; the layer is frozen as before.
    """
    root = layer.parent.parent
    if is_read_only(root):
        raise StoreError(
            f"layer {layer.name} is frozen, and the store {root} is read-only",
            hint="take its images over into a store of your own, which needs no thawing: "
            f"minisandbox image import {root}",
        )
    with hold_lock(root / "locks" / f"thaw-{layer.name}.lock", timeout=_TIMEOUT):
        if is_frozen(layer):
            label = f"thaw-{layer.name[:12]}"
            with store_faults(f"thaw layer {layer.name}"), Staging(root / "staging").directory(label) as work:
                _Thaw(root, layer, work).run()


@dataclass(frozen=True, slots=True)
class _Thaw:
    """One layer that gets its tree back.

    Attributes:
        root: the store's directory.
        layer: the layer's directory.
        work: a private directory.
    """

    root: Path
    layer: Path
    work: Path

    @property
    def _pool(self) -> Pool:
        return Pool(self.root / "objects")

    def run(self) -> None:
        entries = list(listing.read_entries(self.layer))
        growth = Growth(self.work / "tree", self.work / "contents")
        growth.contents.mkdir(mode=0o700)
        with self._pool.using():
            self._fetch({entry.digest: entry.size for entry in entries if self._lacks(entry)}, growth.contents)
            fault_point("thaw-fetched")
            made: list[Entry] = []
            growth.grow(entries, lambda entry: self._link(growth, entry, made))
            fault_point("thaw-grown")
            growth.settle_directories([entry for entry in entries if not _is_closed(entry)])
            sync_filesystem(self.work)  # what a name in the pool leads to is durable
            self._share(growth, entries, made)
        if late := [entry for entry in entries if entry.kind == DIRECTORY and not growth.is_settled(entry)]:
            growth.settle_directories(late)
            sync_filesystem(self.work)
        fault_point("thaw-shared")
        growth.tree.rename(self.layer / "tree")
        fault_point("thaw-renamed")
        sync_directory(self.layer)
        (self.layer / MARKER).unlink(missing_ok=True)

    def _lacks(self, entry: Entry) -> bool:
        """Whether an entry is a file whose inode the pool does not have."""
        if entry.kind != FILE or entry.same:
            return False
        try:
            return not entry.object_name or not looks_like(entry, os.lstat(self._pool.path(entry.object_name)))
        except FileNotFoundError:
            return True

    def _fetch(self, wanted: dict[str, int], place: Path) -> None:
        """Bring contents out of packs, each compared with its hash."""
        needed, free = sum(wanted.values()), os.statvfs(place)
        if needed > free.f_bavail * free.f_frsize:
            raise disk_full(f"thaw layer {self.layer.name}: {needed >> 20} MiB")
        packs = Packs(self.root / "packs").all()
        while wanted and (pack := next(packs, None)) is not None:
            try:
                for digest in fetched(pack, wanted, place):
                    del wanted[digest]
            except StoreError:  # it is damaged; others may have the same, or the layer is made again
                set_aside(self.root, pack.path)
            except FileNotFoundError:  # no frozen layer needed it any more, so this one does not either
                continue
        empty = [digest for digest, size in wanted.items() if not size]
        for digest in empty:
            (place / digest).touch(exist_ok=False)
            del wanted[digest]
        if wanted:
            set_aside(self.root, self.layer)
            raise StoreError(
                f"layer {self.layer.name} is damaged: {len(wanted)} of its contents are in no pack",
                reason="a pack was changed or removed by something other than MiniSandbox",
                hint="the layer was put into quarantine: build its images again",
            )

    def _link(self, growth: Growth, entry: Entry, made: list[Entry]) -> bool:
        """Put a file there out of the pool; note those that have to be made."""
        if entry.object_name:
            if self._pool.lend(entry, growth.path(entry)):
                return True
            made.append(entry)
            content = growth.contents / entry.digest
            if not content.exists():  # the pool's inode takes no further name
                with self._pool.open(entry.object_name) as source:
                    write_content(content, source, entry.digest, entry.size)
        return False

    def _share(self, growth: Growth, entries: list[Entry], made: list[Entry]) -> None:
        """Give the pool the inodes that it lacked; where somebody was quicker, take those."""
        (self.work / "spare").mkdir(mode=0o700)
        more: dict[str, list[str]] = {}
        for entry in entries:
            if entry.same:
                more.setdefault(entry.same, []).append(growth.path(entry))
        for entry in made:
            names = [growth.path(entry), *more.get(entry.path, ())]
            self._pool.share(entry, entry.object, names, first=entry.copy, spare=self.work / "spare")


def _is_closed(entry: Entry) -> bool:
    """Whether a directory's owner may not search it, so that it is settled when nothing in it has to be named."""
    return entry.kind == DIRECTORY and not entry.mode & stat.S_IXUSR


def fetched(pack: Pack, wanted: Mapping[str, int], place: Path) -> Iterator[str]:
    """Write contents of a pack to files that have their hashes for names; yield each that is there.

    Args:
        pack: the pack.
        wanted: sizes by hash; those that the pack does not have are passed over.
        place: the directory.

    Raises:
        StoreError: a content is not what its hash says, or the pack cannot be read.
        OSError: the kernel refused.
    """
    chosen = frozenset(digest for digest, size in pack.rows if wanted.get(digest) == size)
    for digest, content in pack.contents(chosen):
        try:
            if not write_content(place / digest, content, digest, wanted[digest]):
                raise damaged_pack(pack.path, f"content {digest[:16]} is not what its hash says")
        except StoreError:
            (place / digest).unlink()
            raise
        yield digest
