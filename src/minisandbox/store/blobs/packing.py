"""Compress the tar of a layer into a blob: gzip, which every engine reads, or zstd, which is smaller and faster."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, cast

from minisandbox.compression import compressor

GZIP, ZSTD = "gzip", "zstd"
COMPRESSIONS = (GZIP, ZSTD)
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 9
_PIECE = 1 << 20
_WINDOW = 1 << 15  # RFC 1951: how far back deflate looks
_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # RFC 1952: no name, no time, unknown system


@dataclass(frozen=True, slots=True)
class Packed:
    """A blob that was written.

    Attributes:
        diff_id: the digest of its tar.
        digest: its own.
        size: its bytes.
    """

    diff_id: str
    digest: str
    size: int


def pack(tar: Iterable[bytes], compression: str, file: IO[bytes]) -> Packed:
    """Write a blob; the same tar gives the same blob on every machine with the same compressor.

    Args:
        tar: the layer's tar.
        compression: one of :data:`COMPRESSIONS`.
        file: where to.

    Raises:
        OSError: it cannot be written.
    """
    out, diff = _Hashed(file), hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for piece in tar:
            diff.update(piece)
            yield piece

    if compression == GZIP:
        _gzip(_pieces(hashed()), out)
    else:
        with compressor(cast("IO[bytes]", out), _ZSTD_LEVEL, threads=-1) as packer:
            for piece in hashed():
                packer.write(piece)
    return Packed(f"sha256:{diff.hexdigest()}", f"sha256:{out.hash.hexdigest()}", out.size)


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Write to the file."""
        self.hash.update(data)
        self.size += len(data)
        return self._file.write(data)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of one size, the last one apart."""
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) >= _PIECE:
            yield bytes(waiting[:_PIECE])
            del waiting[:_PIECE]
    yield bytes(waiting)


def _gzip(pieces: Iterator[bytes], out: _Hashed) -> None:
    """Write one gzip stream, its pieces compressed in parallel, each with a look back into the last (pigz(1))."""
    workers = len(os.sched_getaffinity(0))
    total = crc = 0
    before = b""
    out.write(_HEAD)
    with ThreadPoolExecutor(workers, "gzip") as pool:
        coming: deque[Future[bytes]] = deque()
        for piece in pieces:
            coming.append(pool.submit(_deflated, piece, before))
            total, crc, before = total + len(piece), zlib.crc32(piece, crc), piece[-_WINDOW:]
            if len(coming) > 2 * workers:
                out.write(coming.popleft().result())
        while coming:
            out.write(coming.popleft().result())
    last = zlib.compressobj(_GZIP_LEVEL, wbits=-15)
    out.write(last.flush() + crc.to_bytes(4, "little") + (total & 0xFFFFFFFF).to_bytes(4, "little"))


def _deflated(piece: bytes, before: bytes) -> bytes:
    """Compress a piece so that another can follow."""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -15, zdict=before)
    return packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)
