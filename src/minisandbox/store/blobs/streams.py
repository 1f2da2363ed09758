"""Read a layer's blob as a tar stream: decompress and hash the blob while it is read."""

from __future__ import annotations

import bz2
import hashlib
import lzma
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Self

from minisandbox import compression
from minisandbox.errors import ImageRefused
from minisandbox.store.disk.faults import disk_full

_READ = 1 << 18
_CHUNK = 1 << 20
_PREFETCH = 4
"""Number of decompressed chunks to prefetch."""
SPARE = 256 << 20
"""Number of bytes to leave free on the disk."""
_MOST_MEMORY = 1 << 29
"""Maximum bytes of memory for decompressing an xz stream."""
_DECOMPRESSORS: Mapping[bytes, Callable[[], compression.Decompressor]] = {
    b"\x1f\x8b": compression.gzip_decompressor,  # RFC 1952, section 2.3.1
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY),
}
LONGEST_MAGIC = 6
"""Number of bytes that identify the compression of a stream."""
_SKIPPABLE = b"\x2a\x4d\x18"
"""Magic number of a skippable zstd frame, after a first byte from 0x50 to 0x5f (RFC 8878, section 3.1.2)."""
_ALGORITHMS = {"sha256": 64, "sha512": 128}
"""Registered digest algorithms, with their number of hexadecimal digits (image-spec, descriptor.md)."""
DIGEST = "a digest is sha256: and 64 or sha512: and 128 lower-case hexadecimal digits"


def is_digest(text: str) -> bool:
    """Return whether a string is a well-formed sha256 or sha512 digest."""
    algorithm, _, digits = text.partition(":")
    return len(digits) == _ALGORITHMS.get(algorithm, -1) and not set(digits) - set("0123456789abcdef")


def check_digest(digest: str) -> str:
    """Return the digest if it is well-formed. A malformed digest would be unsafe in a path or URL.

    Raises:
        ImageRefused: the digest is malformed or has an unknown algorithm.
    """
    if not is_digest(digest):
        raise ImageRefused(
            f"{digest[:100]!r} is not a digest",
            reason=DIGEST,
            hint="the image is malformed: push or save it again",
        )
    return digest


def new_hash(digest: str, content: bytes = b"") -> hashlib._Hash:
    """Return a hash object with the algorithm of a digest, initialized with ``content``."""
    return hashlib.new(digest.partition(":")[0], content)


def check_hash(hasher: hashlib._Hash, digest: str, name: str) -> None:
    """Compare the hash of the read bytes with the expected digest.

    Raises:
        ImageRefused: the digests differ.
    """
    actual = f"{hasher.name}:{hasher.hexdigest()}"
    if actual != digest:
        raise ImageRefused(
            f"{name} does not have the digest {digest}",
            reason=f"its content has {actual}: it is damaged or was replaced",
            hint="nothing was published; pull or save the image again",
        )


def require_room(fd: int, size: int, action: str, spare: int | None = None) -> None:
    """Check that a file system has ``size`` free bytes, plus ``spare`` bytes that must stay free.

    Raises:
        DiskFull: there is not enough space.
    """
    status = os.fstatvfs(fd)
    if status.f_bavail * status.f_frsize < (SPARE if spare is None else spare) + size:
        raise disk_full(action)


class Blob:
    """Read a blob, and hash it while it is read.

    Args:
        file: source of the bytes.
        digest: expected digest; "" if it is unknown.
        name: name of the blob in error messages.

    Attributes:
        given_up: if another thread sets this event, the next :meth:`read` fails.
    """

    def __init__(self, file: compression.ByteSource, digest: str, name: str) -> None:
        self._file = file
        self._digest = check_digest(digest) if digest else ""
        self._hash = new_hash(self._digest or "sha256:")
        self.name, self.given_up = name, threading.Event()

    def read(self, size: int) -> bytes:
        """Read the next bytes; b"" at the end.

        Raises:
            CancelledError: :attr:`given_up` is set.
        """
        if self.given_up.is_set():
            raise CancelledError
        chunk = self._file.read(size)
        if self._digest:
            self._hash.update(chunk)
        return chunk

    def check(self) -> None:
        """Read the remaining bytes, and compare the hash with the digest.

        Raises:
            ImageRefused: the digests differ.
        """
        while self.read(_READ):
            pass
        if self._digest:
            check_hash(self._hash, self._digest, self.name)


class LayerStream:
    """Read the tar in a blob that is compressed with gzip, zstd, xz or bzip2, or not at all.

    The first bytes determine the compression, as in container engines. A thread reads, decompresses and hashes the blob
    until the ``with`` block ends.

    Args:
        blob: the blob.
        limit: maximum bytes of the tar.
        digest: any digest whose algorithm is to be used for :attr:`diff_id`.
    """

    def __init__(self, blob: Blob, limit: int, digest: str = "sha256:") -> None:
        self._blob = blob
        self._remaining = limit
        self._hash = new_hash(digest)
        self._chunks = _Prefetcher(self._hashed(_unpacked(blob)))
        self._chunk = b""
        self._offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.close()

    @property
    def name(self) -> str:
        """Name of the layer in error messages."""
        return self._blob.name

    @property
    def diff_id(self) -> str:
        """Digest of the tar, valid after :meth:`finish`."""
        return f"{self._hash.name}:{self._hash.hexdigest()}"

    def some(self, size: int) -> bytes:
        """Read between 1 and ``size`` bytes; b"" at the end.

        Raises:
            ImageRefused: decompression failed, or the tar is larger than the limit.
        """
        if self._offset == len(self._chunk) and not self._fill():
            return b""
        chunk = self._chunk[self._offset : self._offset + size]
        self._offset += len(chunk)
        return chunk

    def exactly(self, size: int) -> bytes:
        """Read ``size`` bytes; fewer only at the end.

        Raises:
            ImageRefused: as :meth:`some`.
        """
        chunk = self.some(size)
        if len(chunk) == size or not chunk:
            return chunk
        chunks, missing = [chunk], size - len(chunk)
        while missing and (chunk := self.some(missing)):
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)

    def skip(self, size: int) -> bool:
        """Skip ``size`` bytes; return False if the tar is shorter.

        Raises:
            ImageRefused: as :meth:`some`.
        """
        while size and (chunk := self.some(size)):
            size -= len(chunk)
        return not size

    def finish(self) -> None:
        """Read the tar to its end, and check the blob's digest.

        Raises:
            ImageRefused: as :meth:`some`, or the digests differ.
        """
        while self._fill():
            pass
        self._blob.check()

    def _fill(self) -> bool:
        try:
            self._chunk = self._chunks.next()
        except compression.WindowError as error:
            raise ImageRefused(
                f"{self.name} cannot be unpacked",
                reason=str(error),
                hint="nothing was published; compress it with a smaller window: zstd --long=27",
            ) from error
        except (compression.CorruptedError, EOFError) as error:
            raise ImageRefused(
                f"{self.name} cannot be unpacked",
                reason=f"its compressed stream is damaged or ends early ({error})",
                hint="nothing was published; pull or save the image again",
            ) from error
        self._offset = 0
        self._remaining -= len(self._chunk)
        if self._remaining < 0:
            raise ImageRefused(
                f"{self.name} unpacks to too much",
                reason="its tar is larger than a layer may be",
                hint="nothing was published; is it an image that you trust?",
            )
        return bool(self._chunk)

    def _hashed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._hash.update(chunk)
            yield chunk


class _Prefetcher:
    """Prefetch chunks of an iterator in a thread, so that decompression and hashing overlap with unpacking.

    The threads run in parallel because the decompressors and hashlib release the GIL.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._ready: queue.Queue[bytes | BaseException] = queue.Queue(_PREFETCH)
        self._is_done = self._is_started = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def next(self) -> bytes:
        """Return the next chunk; b"" at the end.

        Raises:
            Exception: the iterator failed with this error.
        """
        if self._is_done:
            return b""
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        chunk = self._ready.get()
        self._is_done = not chunk or isinstance(chunk, BaseException)
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk

    def close(self) -> None:
        """Stop the thread."""
        self._is_done = True
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get(timeout=0.01)

    def _read(self) -> None:
        end: bytes | BaseException = b""
        try:
            for chunk in self._chunks:
                if self._is_done:
                    return
                if chunk:
                    self._ready.put(chunk)
        except BaseException as error:  # noqa: BLE001 - raised when the chunk is requested
            end = error
        self._ready.put(end)


def is_packed(magic_bytes: bytes) -> bool:
    """Return whether a stream with these first bytes is compressed; a zstd stream may begin with a skippable frame."""
    skippable = magic_bytes[1:4] == _SKIPPABLE and magic_bytes[0] & 0xF0 == 0x50
    return magic_bytes.startswith((compression.MAGIC, *_DECOMPRESSORS)) or skippable


def _unpacked(blob: Blob) -> Iterator[bytes]:
    head = blob.read(_READ)
    while 0 < len(head) < LONGEST_MAGIC and (chunk := blob.read(_READ)):
        head += chunk
    new_decompressor = next((new for magic, new in _DECOMPRESSORS.items() if head.startswith(magic)), None)
    if new_decompressor is not None:
        yield from _decompressed(blob, head, new_decompressor)
    elif is_packed(head):
        reader = compression.Decompressed(blob, head, every_frame=True)
        while chunk := reader.read(_CHUNK):
            yield chunk
    else:
        while head:
            yield head
            head = blob.read(_READ)


def _decompressed(
    blob: Blob, compressed: bytes, new_decompressor: Callable[[], compression.Decompressor]
) -> Iterator[bytes]:
    """Decompress one or more concatenated streams of gzip, xz or bzip2."""
    while compressed:
        member = new_decompressor()
        while not member.eof:
            try:
                chunk = member.decompress(compressed, _CHUNK)
            except (lzma.LZMAError, OSError, compression.gzip_error()) as error:
                raise compression.CorruptedError(str(error)) from error
            yield chunk
            compressed = b""
            if member.needs_input and not (compressed := blob.read(_READ)):
                raise EOFError("the end of the stream is missing")
        compressed = _after_padding(blob, member.unused_data)


def _after_padding(blob: Blob, padding: bytes) -> bytes:
    """Skip the zero padding that may follow a compressed stream (gzip(1), xz(1)); return the next bytes."""
    while not (stripped := padding.lstrip(b"\0")):
        if not (padding := blob.read(_READ)):
            break
    return stripped
