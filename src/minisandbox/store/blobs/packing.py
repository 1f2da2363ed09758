"""Write a layer as an OCI layer tar, compressed with gzip or zstd."""

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
_WINDOW = 1 << 15
"""Window size of deflate in bytes (RFC 1951)."""
_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""Gzip header without a file name or time, for an unknown operating system (RFC 1952)."""
_CHUNK = 1 << 20
_NANO = 10**9
_TYPES = {FILE: tarfile.REGTYPE, DIRECTORY: tarfile.DIRTYPE, LINK: tarfile.SYMTYPE, FIFO: tarfile.FIFOTYPE}
_END = bytes(1024)
Opener = Callable[[Entry], IO[bytes]]
"""Opens the content of a file entry."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Digests and size of a written blob.

    Attributes:
        diff_id: digest of the uncompressed tar.
        digest: digest of the blob.
        size: bytes of the blob.
    """

    diff_id: str
    digest: str
    size: int


def pack(tar: Iterable[bytes], compression: str, file: IO[bytes]) -> Packed:
    """Compress a tar into a blob, deterministically: the same compressor version creates equal blobs from equal tars.

    Args:
        tar: the layer's tar, in pieces.
        compression: one of :data:`COMPRESSIONS`.
        file: the file to write.

    Raises:
        OSError: the file cannot be written.
    """
    output, diff_hash = _Hashed(file), hashlib.sha256()

    def hashed_chunks() -> Iterator[bytes]:
        for chunk in tar:
            diff_hash.update(chunk)
            yield chunk

    if compression == GZIP:
        _gzip(_pieces(hashed_chunks()), output)
    else:
        with compressor(cast("IO[bytes]", output), _ZSTD_LEVEL, threads=-1) as packer:
            for chunk in hashed_chunks():
                packer.write(chunk)
    return Packed(f"sha256:{diff_hash.hexdigest()}", f"sha256:{output.hash.hexdigest()}", output.size)


class _Hashed:
    """Write to a file, and hash and count the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> int:
        """Write to the file."""
        self.hash.update(chunk)
        self.size += len(chunk)
        return self._file.write(chunk)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split chunks of any size into pieces of equal size; only the last piece may be shorter."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _PIECE:
            yield bytes(buffer[:_PIECE])
            del buffer[:_PIECE]
    yield bytes(buffer)


def _gzip(pieces: Iterator[bytes], output: _Hashed) -> None:
    """Write a gzip stream; compress pieces in parallel, each with the previous one as dictionary, like pigz(1)."""
    workers = len(os.sched_getaffinity(0))
    size = crc = 0
    dictionary = b""
    output.write(_HEAD)
    with ThreadPoolExecutor(workers, "gzip") as pool:
        futures: deque[Future[bytes]] = deque()
        for piece in pieces:
            futures.append(pool.submit(_deflated, piece, dictionary))
            size, crc, dictionary = size + len(piece), zlib.crc32(piece, crc), piece[-_WINDOW:]
            if len(futures) > 2 * workers:
                output.write(futures.popleft().result())
        while futures:
            output.write(futures.popleft().result())
    final_block = zlib.compressobj(_GZIP_LEVEL, wbits=-15)
    output.write(final_block.flush() + crc.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little"))


def _deflated(piece: bytes, dictionary: bytes) -> bytes:
    """Compress a piece of a deflate stream; flush it to a byte boundary so that the next piece can be appended."""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -15, zdict=dictionary)
    return packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)


def write_layer(entries: Iterable[Entry], open_file: Opener, *, keep_owners: bool) -> Iterator[bytes]:
    """Yield the tar of a layer, in pieces.

    Args:
        entries: the entries of the layer's list.
        open_file: opens the content of a file entry.
        keep_owners: whether to write the owners that the files have on disk. Otherwise write root as the owner,
            because all files in the store of an unprivileged user belong to this user.

    Raises:
        StoreError: the layer is damaged, or contains files that the tar of a layer cannot contain.
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
    digest, remaining = hashlib.sha256(), entry.size
    with open_file(entry) as file:
        while chunk := file.read(min(_CHUNK, remaining + 1)):
            remaining -= len(chunk)
            if remaining < 0:
                break
            digest.update(chunk)
            yield chunk
    if remaining or digest.hexdigest() != entry.digest:
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
    """Return nanoseconds as a decimal number of seconds, without rounding."""
    sign, (seconds, nanoseconds) = "-" if mtime < 0 else "", divmod(abs(mtime), _NANO)
    return f"{sign}{seconds}.{nanoseconds:09}"
