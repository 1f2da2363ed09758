"""The blobs of a store's layers: created on demand, stored by digest, recorded at their layers.

A frozen layer needs its zstd blob. Any other blob is a copy that a push, an export or another node asked for; it may go
at any time (:mod:`minisandbox.store.collect`).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from minisandbox.errors import ImageRefused, StoreError
from minisandbox.store.blobs.packing import ZSTD, pack, write_layer
from minisandbox.store.blobs.streams import Blob, LayerStream, check_digest
from minisandbox.store.disk.durable import sync_directory, write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.locks import hold_lock
from minisandbox.store.disk.paths import is_read_only
from minisandbox.store.disk.reading import open_below
from minisandbox.store.disk.scanning import opened_up
from minisandbox.store.entries import Entry, read_entries
from minisandbox.store.records import BLOBS, BlobRecord, is_frozen

COLD = ZSTD
"""How frozen layers are compressed."""
FOLDER = "blobs"
MOST = 128 << 30
"""Bytes of a layer's tar."""
_TIMEOUT = 3600.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerBlob:
    """A layer's blob as a file.

    Attributes:
        path: the file; it may have gone.
        diff_id: the digest of its tar.
        digest: its own.
        size: its bytes.
    """

    path: Path
    diff_id: str
    digest: str
    size: int


def ensure_blob(root: Path, key: str, compression: str, work: Path | None = None) -> LayerBlob:
    """Return a layer's blob, made if it is not there. The caller holds the layer.

    Args:
        root: the store's directory.
        key: the layer.
        compression: one of :data:`.packing.COMPRESSIONS`.
        work: where it is made if the store is only read; None keeps it in the store.

    Raises:
        StoreError: the layer is damaged, or holds what no blob can.
        DiskFull: there is no space for it.
    """
    with store_faults(f"compress layer {key}"):
        blob = known_blob(root, key, compression)
        if blob is not None and is_there(blob) and (work is None or not is_read_only(root)):  # others change theirs
            return blob
        if work is not None:
            return _made(root, key, compression, work)
        with hold_lock(root / "locks" / f"blob-{key}.lock", timeout=_TIMEOUT):
            blob = known_blob(root, key, compression)  # another process may have made it
            if blob is not None and is_there(blob):
                return blob
            return _kept(root, key, compression)


def known_blob(root: Path, key: str, compression: str) -> LayerBlob | None:
    """Return a layer's record of a blob, which may have been removed; None if there is none.

    Raises:
        StoreError: the layer's record of its blobs is damaged.
    """
    record = read_blobs(root, key)
    if record is None or compression not in record.digests:
        return None
    digest = record.digests[compression]
    return LayerBlob(blob_path(root, digest), record.diff_id, digest, record.sizes.get(compression, 0))


def is_there(blob: LayerBlob) -> bool:
    """Return whether a blob's file has its size."""
    try:
        info = blob.path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == blob.size


def read_blobs(root: Path, key: str) -> BlobRecord | None:
    """Return a layer's record of its blobs; None if there is none.

    Raises:
        StoreError: the record is damaged.
    """
    try:
        return BlobRecord.read(root, f"layers/{key}/{BLOBS}")
    except FileNotFoundError:
        return None


def note_place(root: Path, key: str, host: str, repository: str) -> None:
    """Remember that a registry has a layer's blobs in one of its repositories.

    Raises:
        StoreError: the kernel refused.
    """
    with store_faults(f"note where layer {key} is"), hold_lock(root / "locks" / f"blob-{key}.lock", timeout=_TIMEOUT):
        record = read_blobs(root, key)
        if record is not None and record.places.get(host) != repository:
            _write(root, key, dataclasses.replace(record, places={**record.places, host: repository}))


def blob_path(root: Path, digest: str) -> Path:
    """Return where a store keeps a blob.

    Raises:
        ImageRefused: the digest is malformed.
    """
    return root / FOLDER / check_digest(digest).partition(":")[2]


@contextmanager
def open_cold(root: Path, key: str) -> Iterator[LayerStream]:
    """Open the tar of a frozen layer, which the caller holds.

    Raises:
        StoreError: the blob is damaged or has gone.
    """
    try:
        blob = known_blob(root, key, COLD)
        if blob is None or not is_there(blob):
            raise FileNotFoundError("it is not there, or has another size")
        with (
            open_below(root, f"{FOLDER}/{blob.path.name}") as file,
            LayerStream(Blob(file, blob.digest, f"the blob of layer {key}"), MOST) as stream,
        ):
            yield stream
    except (ImageRefused, FileNotFoundError) as error:
        raise StoreError(
            f"layer {key} is damaged: its blob cannot be unpacked",
            reason=str(error),
            hint="run `minisandbox image verify`, and build or pull its images again",
        ) from error


def tar_of(root: Path, key: str) -> Iterator[bytes]:
    """Yield the tar of a layer, which the caller holds: out of its tree, or out of its blob.

    Raises:
        StoreError: the layer is damaged, or holds what no tar can.
        OSError: a file cannot be read.
    """
    if is_frozen(root / "layers" / key):
        with open_cold(root, key) as stream:
            while piece := stream.some(_CHUNK):
                yield piece
            stream.finish()
        return
    owner = (root / "version").lstat().st_uid
    opener = partial(_open_file, root, key)
    yield from write_layer(read_entries(root / "layers" / key), opener, keep_owners=owner == 0)


def _open_file(root: Path, key: str, entry: Entry) -> IO[bytes]:
    name = f"layers/{key}/tree/{entry.path}"
    try:
        return open_below(root, name)
    except PermissionError:  # an image or a build closed it, or a directory above it, to its own owner
        parts, tree = entry.path.split("/"), root / "layers" / key / "tree"
        with ExitStack() as opened:
            for path in (tree.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)):
                if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
                    opened.enter_context(opened_up(path))
            return open_below(root, name)


def _kept(root: Path, key: str, compression: str) -> LayerBlob:
    blob = _made(root, key, compression, root / FOLDER)
    path = blob_path(root, blob.digest)
    record = read_blobs(root, key)
    if record is None or record.diff_id != blob.diff_id:
        record = BlobRecord(blob.diff_id)
    digests, sizes = {**record.digests, compression: blob.digest}, {**record.sizes, compression: blob.size}
    _write(root, key, dataclasses.replace(record, digests=digests, sizes=sizes))  # first: a collection asks it
    os.rename(blob.path, path)
    sync_directory(path.parent)
    return dataclasses.replace(blob, path=path)


def _made(root: Path, key: str, compression: str, folder: Path) -> LayerBlob:
    """Write a blob to a temporary file; those of killed processes are removed."""
    path = folder / f".{key[:12]}.{secrets.token_hex(6)}"
    try:
        with path.open("xb") as file:
            done = pack(tar_of(root, key), compression, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # Ctrl-C included
        path.unlink(missing_ok=True)
        raise
    return LayerBlob(path, done.diff_id, done.digest, done.size)


def _write(root: Path, key: str, record: BlobRecord) -> None:
    write_atomic(root / "layers" / key / BLOBS, record.to_json())
