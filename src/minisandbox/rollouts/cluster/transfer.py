"""Images from one node to another: their records, and the blobs of the layers that are missing there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol, TypeVar

from minisandbox.errors import StoreError
from minisandbox.images.oci.copies import LayerCopy, parse_copy, read_copy, take_copy
from minisandbox.store import LayerRecord, Store
from minisandbox.store.blobs.kept import COLD, FOLDER, LayerBlob, blob_path, ensure_blob
from minisandbox.store.blobs.streams import Blob
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.reading import open_below
from minisandbox.store.sizes import stack_of

T = TypeVar("T")
PATIENCE = 120.0
"""Seconds that a node waits for another's answer."""
_MAKING = 1800.0
"""Seconds that it waits for a blob to be made."""
_CHUNK = 4 << 20
"""Bytes that go over at once."""


class Throttle:
    """Keeps what a node reads and writes for image transfers within a budget. Several threads may use it.

    Args:
        rate: bytes in a second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Wait until so many bytes more are within the budget."""
        if self._rate is None:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self._rate
            wait = self._free - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Source(Protocol):
    """Another node's worker, from which images are fetched."""

    def copy(self, name: str) -> Awaitable[bytes]:
        """Call :meth:`.Worker.copy`."""

    def blob(self, key: str) -> Awaitable[LayerBlob]:
        """Call :meth:`.Worker.blob`."""

    def read(self, digest: str, offset: int) -> Awaitable[bytes]:
        """Call :meth:`.Worker.read`."""


def copy_of(store: Store, name: str) -> bytes:
    """Return an image's records as JSON.

    Raises:
        NotFound: there is no such image, or a layer of it is gone.
        StoreError: a record is damaged.
    """
    image = store.image(name)
    with store.hold(*stack_of(image), frozen=True):
        return read_copy(store, image).to_json()


def blob_of(store: Store, key: str) -> LayerBlob:
    """Return a layer's blob, made if it is not there; it stays until a collection removes it.

    Raises:
        NotFound: there is no such layer.
        StoreError: it is damaged.
        DiskFull: there is no space for it.
    """
    with store.hold(key, frozen=True):
        return ensure_blob(store.root, key, COLD)


def read_part(store: Store, digest: str, offset: int, throttle: Throttle) -> bytes:
    """Return a part of a blob; empty at its end.

    Raises:
        StoreError: it cannot be read, or a collection has removed it.
    """
    path = blob_path(store.root, digest)
    with store_faults(f"read blob {digest}"), open_below(store.root, f"{FOLDER}/{path.name}") as file:
        file.seek(offset)
        part = file.read(_CHUNK)
    throttle(len(part))
    return part


class Peer:
    """Another node, called from a thread.

    Attributes:
        wire: bytes that it sent.

    Args:
        where: what errors call it.
        source: it.
        throttle: this node's budget.
        loop: where it is called.
    """

    def __init__(self, where: str, source: Source, throttle: Throttle, loop: asyncio.AbstractEventLoop) -> None:
        self.where = where
        self.wire = 0
        self._source, self._throttle, self._loop = source, throttle, loop

    def copy(self, name: str) -> bytes:
        """Return the records of an image."""
        return self._ask(self._source.copy(name)).result(PATIENCE)

    @contextmanager
    def open_layer(self, layer: LayerCopy) -> Iterator[Blob]:
        """Open the blob of a layer."""
        blob = self._ask(self._source.blob(layer.record.key)).result(_MAKING)
        parts = self._parts(blob)
        yield Blob(_Reader(parts), blob.digest, f"layer {layer.record.key[:12]} of {self.where}")

    def _parts(self, blob: LayerBlob) -> Iterator[bytes]:
        offset, coming = 0, self._ask(self._source.read(blob.digest, 0))
        while offset < blob.size and (part := coming.result(PATIENCE)):
            offset += len(part)
            self.wire += len(part)
            coming = self._ask(self._source.read(blob.digest, offset))  # it comes while this one is unpacked
            self._throttle(len(part))
            yield part

    def _ask(self, what: Awaitable[T]) -> Future[T]:
        async def ask() -> T:
            return await what

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)


class _Reader:
    """Parts as a file."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._part = b""

    def read(self, size: int, /) -> bytes:
        self._part = self._part or next(self._parts, b"")
        data, self._part = self._part[:size], self._part[size:]
        return data


def fetch_image(store: Store, name: str, peer: Peer) -> list[LayerRecord]:
    """Fetch an image from another node; another one of its name is replaced.

    Returns:
        The layers that were not here before.

    Raises:
        NotFound: the node has no such image, or a layer of it is gone.
        StoreError: what came is damaged; nothing of it is visible.
        ImageRefused: it is malformed.
        DiskFull: the disk is full; layers that were finished before are kept.
        TimeoutError: nothing came.
    """
    copy = parse_copy(peer.copy(name), f"what {peer.where} sent")
    if copy.image.name != name:
        raise StoreError(f"{peer.where} sent image {copy.image.name!r} in place of {name!r}", hint="it is retried")
    return take_copy(store, copy, peer.open_layer, replace=True)
