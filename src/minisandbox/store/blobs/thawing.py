"""Thaw frozen layers: unpack the blob of a layer into its tree."""

from __future__ import annotations

import os
from pathlib import Path

from minisandbox.errors import DiskFull, StoreError
from minisandbox.store import entries as listing
from minisandbox.store.blobs.layer_blobs import open_cold
from minisandbox.store.blobs.unpack import unpack
from minisandbox.store.disk.durable import sync_directory
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.locks import hold_lock
from minisandbox.store.disk.paths import is_read_only, set_aside
from minisandbox.store.disk.staging import staging_directory
from minisandbox.store.entries import PRIVATE, list_digest
from minisandbox.store.objects import Pool
from minisandbox.store.publishing import Made, Publication, rename_directory
from minisandbox.store.records import LayerRecord, is_frozen

_TIMEOUT = 3600.0


def thaw(layer: Path) -> None:
    """Unpack a frozen layer; concurrent callers wait for the first caller.

    The caller must hold a lease on the layer, so that no process freezes or removes the layer meanwhile.

    Args:
        layer: directory of the layer.

    Raises:
        StoreError: the store is read-only, or the layer is damaged and was moved to quarantine.
        DiskFull: the disk is full; the layer is still frozen.
    """
    root = layer.parent.parent
    if is_read_only(root):
        raise StoreError(
            f"layer {layer.name} is frozen, and the store {root} is read-only",
            hint=f"export its images (MINISANDBOX_STORE={root} minisandbox image export --private); import them into a "
            "store of your own",
        )
    with hold_lock(root / "locks" / f"thaw-{layer.name}.lock", timeout=_TIMEOUT):
        if is_frozen(layer):
            label = f"thaw-{layer.name[:12]}"
            with store_faults(f"thaw layer {layer.name}"), staging_directory(root, label) as staging:
                _put_back(layer, _unpacked(root, layer, staging))


def _unpacked(root: Path, layer: Path, staging: Path) -> Path:
    """Unpack a layer's blob; return a directory with the tree and the file list, both synced to disk."""
    try:
        entries = list(listing.read_entries(layer))
        with open_cold(root, layer.name) as stream:
            unpacked = unpack(stream, staging / "tree", None, keep_owners=os.geteuid() == 0)
        copies = {entry.path: entry.copy for entry in entries if entry.copy != PRIVATE}
        made = Made(staging / "tree", digests=unpacked.digests, plain=unpacked.plain, expected=list_digest(entries))
        record = LayerRecord.read(root, f"layers/{layer.name}/layer.json")
        return Publication(Pool(root / "objects"), staging, made, lambda _: (), copies).prepare(record)[0]
    except DiskFull:
        raise
    except StoreError as error:
        set_aside(root, layer)
        error.hint = "the layer was put into quarantine: build or pull its images again"
        raise


def _put_back(layer: Path, unpacked: Path) -> None:
    os.replace(unpacked / listing.NAME, layer / listing.NAME)  # the number of blocks may differ after unpacking
    rename_directory(unpacked / "tree", layer / "tree")
    sync_directory(layer)
