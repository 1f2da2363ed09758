"""Store content-addressed layers and image records on one local file system."""

from __future__ import annotations

from minisandbox.store.disk.paths import default_root
from minisandbox.store.disk.trees import TreeSize, measure_tree, remove_tree
from minisandbox.store.keys import canonical_json, step_key
from minisandbox.store.leases import Holder, Lease
from minisandbox.store.records import FailureRecord, ImageRecord, LayerRecord
from minisandbox.store.store import Made, Store

__all__ = [
    "FailureRecord",
    "Holder",
    "ImageRecord",
    "LayerRecord",
    "Lease",
    "Made",
    "Store",
    "TreeSize",
    "canonical_json",
    "default_root",
    "measure_tree",
    "remove_tree",
    "step_key",
]
