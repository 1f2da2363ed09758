"""Packs: contents of frozen layers, compressed together.

One by one, small files compress badly and still take a block each; together they take less than half of that
(docs/benchmarks.md has the numbers). A pack is written once and never changed. It begins with what is in it, by hash,
then come the contents as one zstd frame.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from minisandbox.compression import CorruptedError, Decompressed, compressor
from minisandbox.errors import StoreError
from minisandbox.store.durable import sync_directory, written_atomically
from minisandbox.store.faults import fault_point
from minisandbox.store.growing import Readable
from minisandbox.store.reading import open_below

LARGEST = 32 << 20
"""Bytes of contents after which a pack is full: what a layer costs at most to thaw besides its own files, 0.1 s."""
LEVEL = 9
"""Of zstd: level 19 saves a tenth more and takes twenty times as long."""

_MAGIC = b"msbpack1"
_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<32sQ")
_WINDOW = 25  # a whole pack
_CHUNK = 1 << 20
_MOST_ROWS = 1 << 22
_SUFFIX = ".pack"


def damaged_pack(path: Path, reason: str) -> StoreError:
    """Return the error for a pack that is not what was written.

    Args:
        path: its file.
        reason: how that was seen.
    """
    hint = "run `minisandbox image verify --full`, and build the images anew that it names"
    return StoreError(f"pack {path} is damaged", reason=reason, hint=hint)


@dataclass(frozen=True, slots=True)
class Piece:
    """A content that goes into a pack.

    Attributes:
        digest: its SHA-256.
        size: its bytes.
        path: a file that holds it.
    """

    digest: str
    size: int
    path: Path


@dataclass(frozen=True, slots=True)
class Pack:
    """One pack.

    Attributes:
        path: its file.
        rows: (hash, bytes) of each content, in its order.
        taken: bytes of the file on disk.
    """

    path: Path
    rows: Sequence[tuple[str, int]]
    taken: int

    @property
    def share(self) -> float:
        """Bytes on disk for each byte of contents."""
        return self.taken / max(sum(size for _, size in self.rows), 1)

    def contents(self, wanted: Collection[str]) -> Iterator[tuple[str, Readable]]:
        """Yield contents that are wanted, by hash, in the pack's order; each is to be read before the next one.

        Raises:
            StoreError: it is no file, or cannot be read to the last of them. Whether a content has its hash is for the
                reader to see.
            FileNotFoundError: it has been removed.
        """
        left = sum(digest in wanted for digest, _ in self.rows)
        with _open(self.path) as file:
            file.seek(_body(len(self.rows)))
            stream = Decompressed(file)
            for digest, size in self.rows:
                if not left:
                    return
                part = _Part(self.path, stream, size)
                if digest in wanted:
                    left -= 1
                    yield digest, part
                part.skip()

    def check(self) -> list[str]:
        """Read everything; return the hashes of contents that are not what was written."""
        bad = {digest for digest, _ in self.rows}
        with suppress(StoreError, FileNotFoundError):
            for digest, content in self.contents(frozenset(bad)):
                if digest_of(content) == digest:
                    bad.discard(digest)
        return sorted(bad)


class _Part:
    """One content of a pack as a stream."""

    def __init__(self, path: Path, stream: Readable, size: int) -> None:
        self._path = path
        self._stream = stream
        self._left = size

    def read(self, size: int = -1, /) -> bytes:
        """Read of this content only."""
        wanted = self._left if size < 0 else min(size, self._left)
        if not wanted:
            return b""
        try:
            data = self._stream.read(wanted)
        except CorruptedError as error:
            raise damaged_pack(self._path, str(error)) from error
        if not data:
            raise damaged_pack(self._path, "it is truncated")
        self._left -= len(data)
        return data

    def skip(self) -> None:
        """Pass over what was not read."""
        while self.read(_CHUNK):
            pass


@dataclass(frozen=True, slots=True)
class Packs:
    """The directory ``packs/``.

    Attributes:
        root: its path.
    """

    root: Path

    def all(self) -> Iterator[Pack]:
        """Yield every pack that has a head, the newest first; one without is no pack, and found by verification."""
        with suppress(FileNotFoundError):  # a store that is only read, from before there were packs
            found = [(_age(path), path) for path in self.root.glob(f"[!.]*{_SUFFIX}")]
            for _, path in sorted(found, reverse=True):
                if (pack := read_pack(path)) is not None:
                    yield pack

    def headless(self) -> list[Path]:
        """Return packs whose head cannot be read."""
        return [path for path in sorted(self.root.glob(f"[!.]*{_SUFFIX}")) if read_pack(path) is None]

    def write(self, pieces: Sequence[Piece]) -> Pack:
        """Write a pack, and see that it can be read; it is durable when this returns.

        Args:
            pieces: what goes into it; one that is not what its hash says is left out.

        Raises:
            OSError: the kernel refused; there is no such pack then.
        """
        rows = [(piece.digest, piece.size) for piece in pieces]
        name = hashlib.sha256(b"".join(_ROW.pack(bytes.fromhex(digest), size) for digest, size in rows)).hexdigest()
        self.root.mkdir(mode=0o700, exist_ok=True)
        path = self.root / f"{name}{_SUFFIX}"
        with written_atomically(path) as file:
            file.write(_MAGIC + _COUNT.pack(len(rows)))
            file.writelines(_ROW.pack(bytes.fromhex(digest), size) for digest, size in rows)
            with compressor(file, LEVEL, window=_WINDOW) as out:
                for piece in pieces:
                    _add(piece, out)
            fault_point("pack-written")
        fault_point("pack-there")
        pack = read_pack(path)
        assert pack is not None  # written a moment ago
        return pack

    def remove(self, pack: Pack) -> None:
        """Remove a pack; nothing happens if it has gone."""
        pack.path.unlink(missing_ok=True)
        sync_directory(self.root)


def _add(piece: Piece, out: IO[bytes]) -> None:
    """Write a content; what it lacks of the bytes that the head promises are zeros, and the check finds that."""
    left = piece.size
    fd = os.open(piece.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as source:
        while left and (chunk := source.read(min(left, _CHUNK))):
            out.write(chunk)
            left -= len(chunk)
    while left:
        left -= out.write(bytes(min(left, _CHUNK)))


def read_pack(path: Path) -> Pack | None:
    """Return the pack of a file; None where it has gone, or it is not what was written, as far as its head says."""
    try:
        with _open(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            (count,) = _COUNT.unpack(file.read(_COUNT.size))
            info = os.fstat(file.fileno())
            if count > min(info.st_size // _ROW.size, _MOST_ROWS):
                return None
            head = file.read(count * _ROW.size)
    except (FileNotFoundError, StoreError, struct.error):
        return None
    rows = tuple((digest.hex(), size) for digest, size in _ROW.iter_unpack(head))
    # its name is the hash of its head, so that no flipped byte there makes it promise what it does not have
    fine = f"{hashlib.sha256(head).hexdigest()}{_SUFFIX}" == path.name
    fine &= len(rows) == 1 or sum(size for _, size in rows) <= LARGEST  # one that is larger is alone
    return Pack(path, rows, info.st_blocks * 512) if fine else None


def digest_of(content: Readable) -> str:
    """Return the SHA-256 of what is left of a stream."""
    found = hashlib.sha256()
    while chunk := content.read(_CHUNK):
        found.update(chunk)
    return found.hexdigest()


def cut(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in portions of a pack each; one that is larger is a pack by itself."""
    portion: list[Piece] = []
    size = 0
    for piece in pieces:
        if portion and size + piece.size > LARGEST:
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += piece.size
    if portion:
        yield portion


def _open(path: Path) -> IO[bytes]:
    return open_below(path.parent.parent, f"{path.parent.name}/{path.name}")


def _body(count: int) -> int:
    return len(_MAGIC) + _COUNT.size + count * _ROW.size


def _age(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except FileNotFoundError:  # removed since
        return 0
