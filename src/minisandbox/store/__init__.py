"""The store: content-addressed layers and image records on one plain file system."""

from __future__ import annotations

from minisandbox.store.keys import canonical_json, step_key
from minisandbox.store.leases import Holder, Lease
from minisandbox.store.paths import default_root
from minisandbox.store.records import FailureRecord, ImageRecord, LayerRecord
from minisandbox.store.staging import Staging
from minisandbox.store.store import Hold, Made, Store
from minisandbox.store.trees import TreeSize, measure_tree, remove_tree

__all__ = [
    "FailureRecord",
    "Hold",
    "Holder",
    "ImageRecord",
    "LayerRecord",
    "Lease",
    "Made",
    "Staging",
    "Store",
    "TreeSize",
    "canonical_json",
    "default_root",
    "measure_tree",
    "remove_tree",
    "step_key",
]
