"""Transfer private copies of images between stores of MiniSandbox, with all records and hidden tests.

Unlike a plain export, a copy may depend on the host's ``/usr``. A copy is an OCI artifact: its configuration holds the
records, and its layers are ordinary blobs (image-spec, manifest.md, "Guidelines for Artifact Usage"). Engines reject
such an artifact. Later builds in the receiving store reuse the copy's layers by their keys. A key cannot be verified
from a layer's content, so a store must only import copies that it trusts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisandbox.errors import InvalidValue, NotFound, StoreError
from minisandbox.images.image import put_if_new
from minisandbox.images.oci import manifest as m
from minisandbox.store import ImageRecord, LayerRecord, Made, Store
from minisandbox.store.blobs.streams import Blob, LayerStream
from minisandbox.store.blobs.unpack import unpack
from minisandbox.store.catalogue import check_name
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.entries import list_digest, read_entries
from minisandbox.store.keys import check_key
from minisandbox.store.sizes import stack_of

MEDIA_TYPE = "application/vnd.minisandbox.image.v1+json"
REPLACE = "replace it with --replace, or give this one another name with --name"
"""The hint of the error about another image of the same name."""


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """The records of a layer in a copy.

    Attributes:
        record: the record of the layer.
        files: the :func:`.entries.list_digest` of the layer's files.
    """

    record: LayerRecord
    files: str


@dataclass(frozen=True, slots=True)
class ImageCopy:
    """The records of an image and of its layers, without their files.

    Attributes:
        image: the record of the image.
        layers: the layers of the image, bottom first, the tests layer last.
    """

    image: ImageRecord
    layers: tuple[LayerCopy, ...]

    def to_json(self) -> bytes:
        """Return the records as JSON."""
        rows = [{**json.loads(layer.record.to_json()), "list": layer.files} for layer in self.layers]
        return json.dumps({"image": json.loads(self.image.to_json()), "layers": rows}, sort_keys=True).encode()


def read_copy(store: Store, image: ImageRecord) -> ImageCopy:
    """Read the records of an image in a store. The caller must hold a lease on the image's layers.

    Raises:
        NotFound: a layer is no longer in the store.
        StoreError: a record or a list of files is damaged.
    """
    layers = []
    for key in stack_of(image):
        record = store.layer(key)
        with store_faults(f"read layer {key}"):
            layers.append(LayerCopy(record, list_digest(read_entries(store.layer_directory(key)))))
    return ImageCopy(image, tuple(layers))


def parse_copy(text: bytes, label: str) -> ImageCopy:
    """Parse a copy's records.

    Args:
        text: the records as JSON.
        label: the name of the records in error messages.

    Raises:
        ImageRefused: the records are malformed.
    """
    records: Any = m.parse_object(text, label)
    try:
        image = ImageRecord.parse(json.dumps(records["image"]).encode(), label)
        layers = [
            LayerCopy(LayerRecord.parse(json.dumps(row).encode(), label), row["list"]) for row in records["layers"]
        ]
        check_name(image.name)
        for key in (image.key, *(text for layer in layers for text in (layer.record.key, layer.files))):
            check_key(key)
    except (KeyError, TypeError, InvalidValue, StoreError) as error:
        raise m.malformed(label, f"its records: {error}") from error
    if [layer.record.key for layer in layers] != list(stack_of(image)) or not image.layers:
        raise m.malformed(label, "its layers are not those of its image")
    return ImageCopy(image, tuple(layers))


def take_copy(
    store: Store,
    copy: ImageCopy,
    open_layer: Callable[[LayerCopy], AbstractContextManager[Blob]],
    *,
    replace: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> list[LayerRecord]:
    """Import a copy; do not fetch layers that the store already has.

    Args:
        store: the store that receives the copy.
        copy: the records of the image.
        open_layer: opens the blob of a layer.
        replace: whether to replace another image of the same name.
        report: called for each layer.

    Returns:
        The records of the new layers.

    Raises:
        InvalidValue: the store has another image of this name.
        ImageRefused: a blob is damaged or hostile.
        StoreError: the files of a layer differ from its record.
        DiskFull: the disk is full; finished layers are kept.
    """
    with suppress(NotFound):
        if not replace and store.image(copy.image.name).key != copy.image.key:
            raise InvalidValue(f"there is another image {copy.image.name!r} in the store {store.root}", hint=REPLACE)
    new_records, below = list[LayerRecord](), list[str]()
    with store.hold(frozen=True) as hold:
        for layer in copy.layers:
            expected = layer.record

            def make(staging: Path, layer: LayerCopy = layer) -> Made:
                report(f"unpacking layer {len(below) + 1} of {len(copy.layers)}: {layer.record.key[:12]}")
                return _unpacked(layer, open_layer, staging)

            record, is_new = store.ensure_layer(
                expected.key, parent=expected.parent, step=expected.step, make=make, stacked_with=below, hold=hold
            )
            below.append(expected.key)
            new_records += [record] if is_new else []
        put_if_new(store, copy.image)
    return new_records


def _unpacked(layer: LayerCopy, open_layer: Callable[[LayerCopy], AbstractContextManager[Blob]], staging: Path) -> Made:
    with open_layer(layer) as blob, LayerStream(blob, m.MOST_LAYER) as stream:
        unpacked = unpack(stream, staging / "tree", None, keep_owners=os.geteuid() == 0)
    facts, seconds = layer.record.facts, float(layer.record.seconds)
    return Made(staging / "tree", facts, seconds, digests=unpacked.digests, plain=unpacked.plain, expected=layer.files)
