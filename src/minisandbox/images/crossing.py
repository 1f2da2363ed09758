"""Images from the store of one node to that of another: only what is missing there, in chunks, checked on arrival.

The receiver asks: for the image's record, for the lists of the layers that it lacks, and then for the contents that no
file of its own has. Each answer is a stream that the sender makes as it is read: neither holds more than a few chunks.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import IO, Protocol, cast

from minisandbox.compression import compressor
from minisandbox.errors import MiniSandboxError, StoreError
from minisandbox.images.travel import Unpacked
from minisandbox.store import ImageRecord, Store
from minisandbox.store.exporting import export_part
from minisandbox.store.growing import Readable
from minisandbox.store.importing import Imported, StreamParcel, import_parcel
from minisandbox.store.parcels import PackedLayer

CHUNK = 1 << 20
"""Bytes that go over at once."""
_AHEAD = 2  # chunks that wait to be read
_LEVEL = 1  # nodes are near, and their processors are the sandboxes'
PATIENCE = 120.0
"""Seconds that one side waits for the other."""


class Throttle:
    """Keeps what a node reads and writes for travelling images within a budget. Several threads may use it.

    Args:
        rate: bytes of contents in a second; None for no limit.
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


class Outgoing:
    """A part of an image on its way out, written by a thread as it is read. Arguments are those of `export_part`.

    Args:
        store: where it is.
        name: the image.
        keys: layers of it.
        contents: hashes of contents of theirs; None for the lists.
        throttle: the node's budget.
    """

    def __init__(
        self, store: Store, name: str, keys: Collection[str], contents: Collection[str] | None, throttle: Throttle
    ) -> None:
        self._chunks: queue.Queue[bytes | BaseException] = queue.Queue(_AHEAD)

        def write() -> None:
            pipe = cast("IO[bytes]", _Pipe(self._chunks))
            try:
                with compressor(pipe, _LEVEL) as out:
                    export_part(store, name, out, keys=keys, contents=contents, progress=_growth(throttle))
                pipe.flush()
                self._chunks.put(b"", timeout=PATIENCE)
            except queue.Full:  # nobody reads any more
                pass
            except Exception as error:  # noqa: BLE001 - whoever reads is told
                self._chunks.put(error)

        threading.Thread(target=write, name="outgoing", daemon=True).start()

    def read(self) -> bytes:
        """Return the next chunk; none at the end.

        Raises:
            MiniSandboxError: it cannot be read from the store.
            queue.Empty: nothing came in time.
        """
        chunk = self._chunks.get(timeout=PATIENCE)
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk


class _Pipe(io.RawIOBase):
    """Collects what is written to chunks."""

    def __init__(self, chunks: queue.Queue[bytes | BaseException]) -> None:
        self._chunks = chunks
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type] # any buffer
        self._data += view
        while len(self._data) >= CHUNK:
            self._chunks.put(bytes(self._data[:CHUNK]), timeout=PATIENCE)
            del self._data[:CHUNK]
        return len(view)

    def flush(self) -> None:
        if self._data and not self.closed:
            self._chunks.put(bytes(self._data), timeout=PATIENCE)
            self._data.clear()


def _growth(throttle: Throttle) -> Callable[[int, int], None]:
    """Tell a throttle of the growth of a count."""
    before = 0

    def grown(done: int, _: int) -> None:
        nonlocal before
        throttle(done - before)
        before = done

    return grown


class Peer(Protocol):
    """Another node, as the thread sees it that takes an image over from there."""

    where: str

    def record(self, name: str) -> ImageRecord:
        """Return the record of an image of its store."""

    def stream(self, name: str, keys: Collection[str], contents: Collection[str] | None) -> Iterator[bytes]:
        """Have a part of an image sent; yields its chunks."""


def take_over(store: Store, name: str, peer: Peer, throttle: Throttle) -> Imported:
    """Take an image over from another node: what its store has of it already is not sent.

    Args:
        store: where to.
        name: the image; another one of that name is replaced.
        peer: the node that has it.
        throttle: this node's budget.

    Raises:
        NotFound: the node has no such image, or a layer of it is gone.
        StoreError: what came is truncated or damaged; nothing of it is visible.
        DiskFull: the disk is full; layers that were finished before are kept.
    """
    return import_parcel(store, _PeerParcel(peer, name), replace=True, progress=_growth(throttle))


class _PeerParcel:
    """An image of another node, as a parcel."""

    def __init__(self, peer: Peer, name: str) -> None:
        self.where = peer.where
        self.images = [peer.record(name)]
        self._peer = peer
        self._name = name
        self._keys: frozenset[str] = frozenset()

    def layers(self, wanted: set[str]) -> list[PackedLayer]:
        """Ask for the lists of layers."""
        self._keys = frozenset(wanted)
        with self._opened(None) as parcel:
            return parcel.layers(wanted)

    def contents(self, wanted: set[str]) -> Iterator[tuple[str, Readable]]:
        """Ask for contents, and for nothing where none is wanted."""
        if wanted:
            with self._opened(sorted(wanted)) as parcel:
                yield from parcel.contents(wanted)

    @contextmanager
    def _opened(self, contents: Collection[str] | None) -> Iterator[StreamParcel]:
        chunks = _Chunks(self._peer.stream(self._name, self._keys, contents))
        source = Unpacked(cast("IO[bytes]", chunks), self.where)
        try:
            yield StreamParcel(source, self.where)
        except MiniSandboxError:  # some of ours are ValueErrors as well
            raise
        except (EOFError, ValueError) as error:
            raise StoreError(
                f"what {self.where} sent is truncated", reason=str(error), hint="it is tried again"
            ) from error


class _Chunks:
    """Chunks as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._data = b""

    def read(self, size: int = -1, /) -> bytes:
        if not self._data:
            self._data = next(self._chunks, b"")
        data, self._data = (self._data, b"") if size < 0 else (self._data[:size], self._data[size:])
        return data
