"""Create a layer's blobs on demand, store them by digest, and record them in the layer's directory.

A frozen layer consists of its zstd blob. All other blobs are copies for a push, an export or another node, and can be
created again, so garbage collection (:mod:`minisandbox.store.collect`) may remove them at any time.
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
"""Compression of frozen layers."""
FOLDER = "blobs"
MOST = 128 << 30
"""Maximum bytes of a layer's tar."""
_TIMEOUT = 3600.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerBlob:
    """Blob file of a layer.

    Attributes:
        path: path of the blob's file, which may have been removed since.
        diff_id: digest of the uncompressed tar.
        digest: digest of the blob.
        size: bytes of the blob.
    """

    path: Path
    diff_id: str
    digest: str
    size: int


def ensure_blob(root: Path, key: str, compression: str, folder: Path | None = None) -> LayerBlob:
    """Return a layer's blob; create the blob if it is missing. The caller must hold a lease on the layer.

    Args:
        root: the store's directory.
        key: key of the layer.
        compression: one of :data:`.packing.COMPRESSIONS`.
        folder: directory to write the blob to, if the store is read-only; None adds the blob to the store.

    Raises:
        StoreError: the layer is damaged, or contains files that a blob cannot contain.
        DiskFull: there is no space for the blob.
    """
    with store_faults(f"compress layer {key}"):
        blob = known_blob(root, key, compression)
        # Do not use a blob of a read-only store, because the owner of the store may change the blob while it is read.
        if blob is not None and is_there(blob) and (folder is None or not is_read_only(root)):
            return blob
        if folder is not None:
            return _write_blob(root, key, compression, folder)
        with hold_lock(root / "locks" / f"blob-{key}.lock", timeout=_TIMEOUT):
            blob = known_blob(root, key, compression)  # another process may have created it
            if blob is not None and is_there(blob):
                return blob
            return _store_blob(root, key, compression)


def known_blob(root: Path, key: str, compression: str) -> LayerBlob | None:
    """Return a layer's blob from the layer's record, without checking its file, or None if no blob is recorded.

    Raises:
        StoreError: the record of the layer's blobs is damaged.
    """
    record = read_blobs(root, key)
    if record is None or compression not in record.digests:
        return None
    digest = record.digests[compression]
    return LayerBlob(blob_path(root, digest), record.diff_id, digest, record.sizes.get(compression, 0))


def is_there(blob: LayerBlob) -> bool:
    """Return whether a blob's file exists and has the recorded size."""
    try:
        status = blob.path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == blob.size


def read_blobs(root: Path, key: str) -> BlobRecord | None:
    """Return the record of a layer's blobs, or None if there is no record.

    Raises:
        StoreError: the record is damaged.
    """
    try:
        return BlobRecord.read(root, f"layers/{key}/{BLOBS}")
    except FileNotFoundError:
        return None


def note_place(root: Path, key: str, host: str, repository: str) -> None:
    """Record that a registry has a layer's blobs in a repository, so that a later push need not upload them.

    Raises:
        StoreError: a system call failed.
    """
    with store_faults(f"note where layer {key} is"), hold_lock(root / "locks" / f"blob-{key}.lock", timeout=_TIMEOUT):
        record = read_blobs(root, key)
        if record is not None and record.places.get(host) != repository:
            _write(root, key, dataclasses.replace(record, places={**record.places, host: repository}))


def blob_path(root: Path, digest: str) -> Path:
    """Return the path of the blob with this digest in a store.

    Raises:
        ImageRefused: the digest is malformed.
    """
    return root / FOLDER / check_digest(digest).partition(":")[2]


@contextmanager
def open_cold(root: Path, key: str) -> Iterator[LayerStream]:
    """Open the tar of a frozen layer. The caller must hold a lease on the layer.

    Raises:
        StoreError: the blob is damaged or missing.
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
    """Yield a layer's tar from its tree, or from its blob if it is frozen. The caller must hold a lease on the layer.

    Raises:
        StoreError: the layer is damaged, or contains files that the tar of a layer cannot contain.
        OSError: a file cannot be read.
    """
    if is_frozen(root / "layers" / key):
        with open_cold(root, key) as stream:
            while chunk := stream.some(_CHUNK):
                yield chunk
            stream.finish()
        return
    owner = (root / "version").lstat().st_uid
    opener = partial(_open_file, root, key)
    yield from write_layer(read_entries(root / "layers" / key), opener, keep_owners=owner == 0)


def _open_file(root: Path, key: str, entry: Entry) -> IO[bytes]:
    name = f"layers/{key}/tree/{entry.path}"
    try:
        return open_below(root, name)
    except PermissionError:  # the owner has no read permission for the file or a parent directory
        names, tree = entry.path.split("/"), root / "layers" / key / "tree"
        with ExitStack() as restore_modes:
            for path in (tree.joinpath(*names[:depth]) for depth in range(1, len(names) + 1)):
                if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
                    restore_modes.enter_context(opened_up(path))
            return open_below(root, name)


def _store_blob(root: Path, key: str, compression: str) -> LayerBlob:
    blob = _write_blob(root, key, compression, root / FOLDER)
    path = blob_path(root, blob.digest)
    record = read_blobs(root, key)
    if record is None or record.diff_id != blob.diff_id:
        record = BlobRecord(blob.diff_id)
    digests, sizes = {**record.digests, compression: blob.digest}, {**record.sizes, compression: blob.size}
    # Write the record before the rename, because garbage collection removes blobs without a record.
    _write(root, key, dataclasses.replace(record, digests=digests, sizes=sizes))
    os.rename(blob.path, path)
    sync_directory(path.parent)
    return dataclasses.replace(blob, path=path)


def _write_blob(root: Path, key: str, compression: str, folder: Path) -> LayerBlob:
    """Write a blob to a temporary file; opening the store removes the temporary files of killed processes."""
    path = folder / f".{key[:12]}.{secrets.token_hex(6)}"
    try:
        with path.open("xb") as file:
            packed = pack(tar_of(root, key), compression, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # also on Ctrl-C, leave no partial blob
        path.unlink(missing_ok=True)
        raise
    return LayerBlob(path, packed.diff_id, packed.digest, packed.size)


def _write(root: Path, key: str, record: BlobRecord) -> None:
    write_atomic(root / "layers" / key / BLOBS, record.to_json())
