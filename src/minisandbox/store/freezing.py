"""Freezing: the files of layers that are not used now are kept compressed, in packs, until their next use.

First a layer loses its tree: one rename. What of its files other layers have too stays in the pool for these, and for
it. What nobody else has is an orphan of the pool then, which nobody removes because the list of a frozen layer names
it. Orphans go into packs, and leave the pool once their pack is durable and was read again. So at any moment each
content is somewhere, and whoever dies leaves only work for the next one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.store import entries as listing
from minisandbox.store.durable import sync_directory, write_atomic
from minisandbox.store.entries import FILE, PRIVATE, Entry
from minisandbox.store.faults import fault_point, store_faults
from minisandbox.store.leases import open_exclusive
from minisandbox.store.objects import looks_like
from minisandbox.store.packs import Piece, cut
from minisandbox.store.sizes import StoreSizes, stack_of
from minisandbox.store.store import Store
from minisandbox.store.thawing import MARKER
from minisandbox.store.trees import remove_tree

EXPECTED = 0.25
"""What packs take of their files' blocks, about (docs/benchmarks.md)."""


@dataclass(slots=True)
class Frozen:
    """What was frozen, or would be.

    Attributes:
        images: names of images of which layers were frozen.
        layers: keys of layers.
        spared: keys of layers that stay as they are: in use, without a list of files, or damaged.
        packed: bytes of files that are kept compressed now.
        packs: bytes that the new packs take.
        freed: bytes that are free now, those of new packs taken off; in a dry run an estimate.
    """

    images: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    spared: list[str] = field(default_factory=list)
    packed: int = 0
    packs: int = 0
    freed: int = 0


def freeze(
    store: Store, names: Iterable[str], *, dry_run: bool = False, progress: Callable[[str], None] | None = None
) -> Frozen:
    """Keep the layers of images compressed until their next use, if no other image has them.

    Sandboxes and builds of other processes may run meanwhile: what somebody uses stays as it is.

    Args:
        store: the store.
        names: the images.
        dry_run: freeze nothing, only say what would be.
        progress: told of each step.

    Returns:
        What was done.

    Raises:
        NotFound: there is no image of one of these names; nothing was frozen.
        StoreError: the store is read-only, a record is damaged, or the kernel refused.
        DiskFull: there is no space for a pack; what is in no pack yet waits uncompressed for the next time.
    """
    store.require_writable("freeze images")
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        store.image(name)
    with store_faults("freeze images"), store.alone():
        work = _Freezing(store, dry_run, progress or _silent)
        work.run(wanted)
    return work.done


def thaw_images(store: Store, names: Iterable[str]) -> list[str]:
    """Give all layers of images their trees back now, not at their next use.

    Args:
        store: the store.
        names: the images.

    Returns:
        The keys of the layers that were frozen.

    Raises:
        NotFound: there is no such image, or a layer of it is gone.
        StoreError: the store is read-only, or a layer is damaged.
        DiskFull: there is no space.
    """
    stacks = [stack_of(store.image(name)) for name in dict.fromkeys(names)]
    keys = dict.fromkeys(key for stack in stacks for key in stack)
    frozen = [key for key in keys if store.is_frozen(key)]
    for key in frozen:
        with store.hold(key):
            pass
    return frozen


@dataclass(slots=True)
class _Freezing:
    """One freezing on its way."""

    store: Store
    dry_run: bool
    tell: Callable[[str], None]
    done: Frozen = field(default_factory=Frozen)
    _freed: int = 0

    def run(self, names: Sequence[str]) -> None:
        """Freeze what only these images have, and those that are frozen already."""
        sizes = StoreSizes(self.store, self.store.images())
        cold = {name for name, image in sizes.images.items() if any(map(self.store.is_frozen, stack_of(image)))}
        own = sizes.only_of({*names, *cold})
        for name in names:
            chosen = [key for key in stack_of(sizes.images[name]) if key in own and key not in self.done.layers]
            frozen = [key for key in chosen if not self.store.is_frozen(key) and self._freeze(key)]
            if frozen:
                self.done.layers += frozen
                self.done.images.append(name)
                self.tell(f"image {name}")
        if self.dry_run:
            self.done.freed = round((1 - EXPECTED) * sizes.freed(self.done.layers))
            return
        self._freed += sum(sizes.layers[key].private for key in self.done.layers)
        self._pack()
        self._freed += remove_packs(self.store)
        self.done.freed = self._freed

    def _freeze(self, key: str) -> bool:
        """Take a layer's tree away, if nobody uses it; its files stay in the pool."""
        layer = self.store.layer_directory(key)
        fd = open_exclusive(layer)
        if fd is None:
            self.done.spared += [] if key in self.done.spared else [key]
            return False
        try:
            if not self._is_in_pool(layer):
                self.done.spared += [] if key in self.done.spared else [key]
                return False
            if not self.dry_run:
                write_atomic(layer / MARKER, b"")
                fault_point("layer-marked")
                self._remove_tree(layer / "tree")
        finally:
            os.close(fd)
        return True

    def _is_in_pool(self, layer: Path) -> bool:
        """Whether the pool has every file of a layer that holds anything, by the very inode."""
        try:
            for entry in listing.read_entries(layer):
                if entry.kind == FILE and entry.size and not entry.same and not self._has(layer, entry):
                    return False
        except (FileNotFoundError, StoreError):  # of an earlier MiniSandbox, or damaged: verification tells
            return False
        return True

    def _has(self, layer: Path, entry: Entry) -> bool:
        if entry.copy == PRIVATE:
            return False
        try:
            pooled = os.lstat(self.store.pool.path(entry.object_name))
            return looks_like(entry, pooled) and os.path.samestat(pooled, os.lstat(layer / "tree" / entry.path))
        except FileNotFoundError:
            return False

    def _remove_tree(self, tree: Path) -> None:
        gone = self.store.root / "staging" / f"frozen.{secrets.token_hex(6)}"
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # a half-made thing of ours, until we are dead
            tree.rename(gone)
            sync_directory(tree.parent)
            fault_point("tree-taken")
            remove_tree(gone)
        finally:
            os.close(fd)

    def _pack(self) -> None:
        """Put the files of frozen layers that nobody else has into packs."""
        packed = {digest: pack for pack in self.store.packs.all() for digest, _ in pack.rows}
        order = [*self.done.layers, *(key for key in frozen_keys(self.store) if key not in self.done.layers)]
        orphans: dict[str, list[_Orphan]] = {}
        for orphan in self._orphans(order):
            orphans.setdefault(orphan.entry.digest, []).append(orphan)
        for digest in [digest for digest in orphans if digest in packed]:  # it was packed before it was thawed
            self._unlink(orphans.pop(digest))
        pieces = (Piece(digest, found[0].entry.size, found[0].path) for digest, found in orphans.items())
        total = sum(found[0].entry.size for found in orphans.values())
        for portion in cut(pieces):
            for digest in self._write(portion):
                self._unlink(orphans[digest])
            fault_point("orphans-unlinked")
            self.tell(f"{self.done.packed >> 20} of {total >> 20} MiB compressed")

    def _write(self, portion: Sequence[Piece]) -> list[str]:
        """Write a pack and read it again; return what can be had from it."""
        while portion:
            pack = self.store.packs.write(portion)
            bad = set(pack.check())
            if not bad:
                self.done.packs += pack.taken
                self.done.packed += sum(piece.size for piece in portion)
                self._freed -= pack.taken
                return [piece.digest for piece in portion]
            self.store.packs.remove(pack)  # a file was damaged, and stays for the verification to find
            portion = [piece for piece in portion if piece.digest not in bad]
        return []

    def _orphans(self, keys: Iterable[str]) -> Iterator[_Orphan]:
        seen: set[str] = set()
        for key in keys:
            for entry in _listed(self.store, key):
                name = entry.object_name
                readable = entry.mode & stat.S_IRUSR or os.geteuid() == 0
                if entry.kind == FILE and entry.size and readable and name and name not in seen:
                    seen.add(name)
                    path = self.store.pool.path(name)
                    info = _status(path)
                    if info is not None and info.st_nlink == 1 and looks_like(entry, info):
                        yield _Orphan(entry, path, info.st_ino)

    def _unlink(self, orphans: Iterable[_Orphan]) -> None:
        """Take packed files out of the pool, but for those that a layer has taken up meanwhile."""
        with self.store.pool.using(exclusive=True):
            for orphan in orphans:
                info = _status(orphan.path)
                if info is not None and info.st_nlink == 1 and info.st_ino == orphan.inode:
                    orphan.path.unlink()
                    self._freed += info.st_blocks * 512


@dataclass(frozen=True, slots=True)
class _Orphan:
    """A file of frozen layers that no other layer has."""

    entry: Entry
    path: Path
    inode: int


def frozen_keys(store: Store) -> list[str]:
    """Return the keys of all frozen layers, in order."""
    return [key for key in store.layer_keys() if store.is_frozen(key)]


def needed_objects(store: Store) -> frozenset[str]:
    """Return the names of the pool's objects that frozen layers need, because no pack has them.

    Raises:
        OSError: a pack cannot be read.
    """
    packed = {digest for pack in store.packs.all() for digest, _ in pack.rows}
    return frozenset(
        entry.object_name
        for key in frozen_keys(store)
        for entry in _listed(store, key)
        if entry.object_name and entry.digest not in packed
    )


def remove_packs(store: Store, *, dry_run: bool = False) -> int:
    """Remove packs of which no frozen layer needs anything; return the bytes that they take.

    The caller keeps layers from being frozen meanwhile (:meth:`.Store.alone`).

    Raises:
        OSError: the kernel refused.
    """
    packs = list(store.packs.all())
    needed = {entry.digest for key in frozen_keys(store) for entry in _listed(store, key)} if packs else set()
    unneeded = [pack for pack in packs if not any(digest in needed for digest, _ in pack.rows)]
    for pack in unneeded if not dry_run else ():
        store.packs.remove(pack)
    return sum(pack.taken for pack in unneeded)


def _listed(store: Store, key: str) -> Iterator[Entry]:
    """The files of a layer as its list says; none where it has gone, or the list is damaged."""
    with suppress(FileNotFoundError, StoreError):
        yield from listing.read_entries(store.layer_directory(key))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _silent(_: str) -> None:
    """Tell nobody."""
