"""Freeze unused layers: replace the tree of a layer by a compressed blob until its next use.

The blob is synced to disk and recorded in the layer's directory before a rename removes the tree. If the process is
killed, the layer is therefore either unchanged or completely frozen.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import DiskFull, NotFound, StoreError
from minisandbox.store.blobs.layer_blobs import COLD, blob_path, ensure_blob, read_blobs
from minisandbox.store.disk.durable import sync_directory
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.locks import DIRECTORY, hold_flock
from minisandbox.store.disk.trees import remove_tree
from minisandbox.store.leases import in_use, open_exclusive
from minisandbox.store.publishing import rename_directory
from minisandbox.store.sizes import StoreSizes, stack_of
from minisandbox.store.store import Store

EXPECTED = 0.3
"""Typical ratio of a blob's size to the disk usage of the layer's tree (docs/benchmarks.md)."""
_TIMEOUT = 3600.0


@dataclass(slots=True)
class Frozen:
    """The images and layers that were frozen; in a dry run, those that would be frozen.

    Attributes:
        images: names of images with newly frozen layers.
        layers: keys of the frozen layers.
        spared: keys of layers that were not frozen because they are in use, are damaged, or have files that a blob
            cannot contain.
        blobs: total bytes of the new blobs.
        freed: bytes of the removed trees minus the bytes of the new blobs; an estimate in a dry run.
    """

    images: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    spared: list[str] = field(default_factory=list)
    blobs: int = 0
    freed: int = 0


def freeze(
    store: Store, names: Iterable[str], *, dry_run: bool = False, progress: Callable[[str], None] | None = None
) -> Frozen:
    """Compress the layers of images until their next use, except layers that other images share.

    Other processes may run sandboxes and builds meanwhile, because layers in use stay unchanged.

    Args:
        store: the store.
        names: names of the images.
        dry_run: freeze nothing, only report what would be frozen.
        progress: called with a description of each frozen image.

    Returns:
        The frozen images and layers.

    Raises:
        NotFound: an image of ``names`` does not exist; nothing was frozen.
        StoreError: the store is read-only, a record is damaged, or a system call failed.
        DiskFull: there is no space for a blob; layers that were frozen before stay frozen.
    """
    store.require_writable("freeze images")
    image_names = list(dict.fromkeys(names))
    for name in image_names:
        store.image(name)
    with store_faults("freeze images"), store.alone():
        freezing = _Freezing(store, dry_run, progress or (lambda _: None))
        freezing.run(image_names)
    return freezing.result


def blob_names(store: Store) -> tuple[set[str], set[str]]:
    """Return the names of blobs that frozen layers need, and the names of all other recorded blobs."""
    needed_names, other_names = set[str](), set[str]()
    for key in store.layer_keys():
        with suppress(StoreError):  # skip a damaged record; `image verify` reports it
            record = read_blobs(store.root, key)
            for compression, digest in record.digests.items() if record is not None else ():
                is_needed = compression == COLD and store.is_frozen(key)
                (needed_names if is_needed else other_names).add(blob_path(store.root, digest).name)
    return needed_names, other_names - needed_names


def remove_copies(store: Store, compression: str, digests: Sequence[str]) -> None:
    """Remove blobs, except those that frozen layers need."""
    if digests:
        with store_faults("remove blobs"), store.alone():
            needed_names = blob_names(store)[0] if compression == COLD else ()
            for path in (blob_path(store.root, digest) for digest in digests):
                if path.name not in needed_names:
                    path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Freezing:
    """State of one :func:`freeze` call."""

    store: Store
    dry_run: bool
    report: Callable[[str], None]
    result: Frozen = field(default_factory=Frozen)

    def run(self, names: Sequence[str]) -> None:
        """Freeze the layers of these images; skip layers that also belong to other images, unless those are frozen."""
        sizes = StoreSizes(self.store, self.store.images())
        frozen = {name for name, image in sizes.images.items() if any(map(self.store.is_frozen, stack_of(image)))}
        exclusive = sizes.only_of({*names, *frozen})
        for name in names:
            keys = [key for key in stack_of(sizes.images[name]) if key in exclusive and key not in self.result.layers]
            new_keys = [key for key in keys if not self.store.is_frozen(key) and self._try(key)]
            if new_keys:
                self.result.layers += new_keys
                self.result.images.append(name)
                self.report(f"image {name}")
        if self.dry_run:
            self.result.freed = round((1 - EXPECTED) * sizes.freed(self.result.layers))
            return
        orphans = self.store.pool.remove_orphans()[1]
        private = sum(sizes.layers[key].private for key in self.result.layers)
        self.result.freed = private + orphans - self.result.blobs

    def _try(self, key: str) -> bool:
        is_newly_frozen = not in_use(self.store.layer_directory(key)) and (self.dry_run or self._freeze(key))
        if not is_newly_frozen and key not in self.result.spared:
            self.result.spared.append(key)
        return is_newly_frozen

    def _freeze(self, key: str) -> bool:
        """Freeze a layer; return False if the layer is in use or cannot be compressed."""
        try:
            with self.store.hold(key):
                blob = ensure_blob(self.store.root, key, COLD)
        except DiskFull:
            raise
        except (NotFound, StoreError):  # removed by another process, or damaged, which `image verify` reports
            return False
        layer = self.store.layer_directory(key)
        fd = open_exclusive(layer)
        if fd is None:
            return False
        try:
            self._remove_tree(layer / "tree")
        finally:
            os.close(fd)
        self.result.blobs += blob.size
        return True

    def _remove_tree(self, tree: Path) -> None:
        trash = self.store.root / "staging" / f"frozen.{secrets.token_hex(6)}"
        with hold_flock(tree, DIRECTORY):  # keeps reclaim() from removing the tree at the same time
            rename_directory(tree, trash)
            sync_directory(tree.parent)
            remove_tree(trash)
