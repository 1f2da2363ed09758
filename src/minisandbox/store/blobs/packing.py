"""Write a layer as a blob: its tar as OCI has it, compressed with gzip or zstd."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, NoReturn, cast

from minisandbox.compression import compressor
from minisandbox.errors import StoreError
from minisandbox.store.blobs.unpack import DEEPEST, LATEST, LONGEST_PATH, OPAQUE, OPAQUE_MARK, WHITEOUT
from minisandbox.store.entries import DIRECTORY, FIFO, FILE, LINK, Entry
from minisandbox.store.entries import WHITEOUT as REMOVED

GZIP, ZSTD = "gzip", "zstd"
COMPRESSIONS = (GZIP, ZSTD)
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 9
_PIECE = 1 << 20
_WINDOW = 1 << 15  # RFC 1951: how far back deflate looks
_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # RFC 1952: no name, no time, unknown system
_CHUNK = 1 << 20
_NANO = 10**9
_TYPES = {FILE: tarfile.REGTYPE, DIRECTORY: tarfile.DIRTYPE, LINK: tarfile.SYMTYPE, FIFO: tarfile.FIFOTYPE}
_END = bytes(1024)
Opener = Callable[[Entry], IO[bytes]]
"""Opens the content of a file."""


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
        OSError: the file cannot be written.
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
    """Yield the same bytes in pieces of one size; the last one may be shorter."""
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


def write_layer(entries: Iterable[Entry], open_file: Opener, *, keep_owners: bool) -> Iterator[bytes]:
    """Yield the tar of a layer, in pieces.

    Args:
        entries: the layer's list.
        open_file: opens the content of a file of it.
        keep_owners: whether owners are written; if the store's owner has all files, they are root's.

    Raises:
        StoreError: the layer is damaged, or holds what no such tar can.
        OSError: a file cannot be read.
    """
    for entry in entries:
        _check(entry)
        uid, gid = (entry.uid, entry.gid) if keep_owners else (0, 0)
        yield _header(entry, uid, gid)
        if entry.kind == FILE and not entry.same:
            yield from _content(entry, open_file)
        elif entry.kind == DIRECTORY and (OPAQUE, b"y".hex()) in entry.attributes:
            yield _buffer(tarfile.TarInfo(_joined(entry.path, OPAQUE_MARK)), {})
    yield _END


def _header(entry: Entry, uid: int, gid: int) -> bytes:
    if entry.kind == REMOVED:
        folder, _, name = entry.path.rpartition("/")
        return _buffer(tarfile.TarInfo(_joined(folder, WHITEOUT + name)), {})
    info = tarfile.TarInfo(entry.path or ".")
    info.mode, info.uid, info.gid, info.mtime = entry.mode, uid, gid, entry.mtime // _NANO
    info.type = tarfile.LNKTYPE if entry.same else _TYPES[entry.kind]
    info.linkname = entry.same or entry.target
    records: dict[str, str] = {}
    if entry.mtime % _NANO or entry.mtime < 0:
        records["mtime"] = _decimal(entry.mtime)
    if entry.same:
        return _buffer(info, records)
    info.size = entry.size
    for name, value in entry.attributes:
        if not name.startswith("user.overlay."):
            records[f"SCHILY.xattr.{name}"] = bytes.fromhex(value).decode("utf-8", "surrogateescape")
    return _buffer(info, records)


def _buffer(info: tarfile.TarInfo, records: dict[str, str]) -> bytes:
    info.pax_headers = records
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(entry: Entry, open_file: Opener) -> Iterator[bytes]:
    hashed, remaining = hashlib.sha256(), entry.size
    with open_file(entry) as file:
        while chunk := file.read(min(_CHUNK, remaining + 1)):
            remaining -= len(chunk)
            if remaining < 0:
                break
            hashed.update(chunk)
            yield chunk
    if remaining or hashed.hexdigest() != entry.digest:
        raise StoreError(
            f"a layer is damaged: {entry.path} has other content than when it was made",
            hint="run `minisandbox image verify --full`, and build its images again",
        )
    yield bytes(-entry.size % tarfile.BLOCKSIZE)


def _check(entry: Entry) -> None:
    """Reject entries that a reader of the tar would refuse or misread."""
    try:
        os.fsencode(entry.path + entry.target + entry.same)
    except UnicodeEncodeError:
        _refuse(entry, "its name has half of a surrogate pair, which no file's name has")
    names = entry.path.split("/")
    if len(names) > DEEPEST:
        _refuse(entry, f"it lies in more than {DEEPEST} directories")
    if len(os.fsencode(entry.path)) > LONGEST_PATH:
        _refuse(entry, f"its path has more than {LONGEST_PATH} bytes")
    if names[-1].startswith(WHITEOUT):
        _refuse(entry, f"names that begin with {WHITEOUT} say in layers that a file is gone")
    if abs(entry.mtime) > LATEST:
        _refuse(entry, "its time of change is centuries from now")


def _refuse(entry: Entry, reason: str) -> NoReturn:
    raise StoreError(
        f"{entry.path[:200]!r} cannot be in the layer of an OCI image",
        reason=reason,
        hint="remove it in the step that makes it",
    )


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _decimal(mtime: int) -> str:
    """Nanoseconds as seconds, exactly."""
    sign, (seconds, nanoseconds) = "-" if mtime < 0 else "", divmod(abs(mtime), _NANO)
    return f"{sign}{seconds}.{nanoseconds:09}"
