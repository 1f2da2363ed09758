"""Read and write a layer's file list, which has one entry for each name in the layer's tree."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.store.disk.reading import read_below

FORMAT = 1
NAME = "files.gz"
PRIVATE = -1
MOST = 1 << 30
"""Maximum bytes of an uncompressed file list, enough for about six million files."""
_LONGEST = 1 << 22
_BUFFER = 1 << 16
_LARGEST = (1 << 63) - 1
_DIGEST = re.compile(rb'"([0-9a-f]{64})"')

FILE, DIRECTORY, LINK, WHITEOUT, FIFO = "f", "d", "l", "w", "p"
KINDS = frozenset((FILE, DIRECTORY, LINK, WHITEOUT, FIFO))

Attributes = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Entry:
    """One name in a layer's tree.

    Attributes:
        path: path relative to the tree; ``""`` is the tree itself. Bytes that are not UTF-8 are surrogate escapes.
        kind: one of :data:`KINDS`; a whiteout (character device 0/0) marks a name as deleted in overlayfs.
        mode: permission bits, with setuid, setgid and sticky.
        uid: owner of the inode on disk.
        gid: group of the inode on disk.
        mtime: nanoseconds since the epoch.
        size: bytes of a file's content.
        disk: bytes of the allocated disk blocks, without the inode.
        digest: SHA-256 of a file's content; "" for other kinds.
        copy: number of the pool object's copy that the file is a hard link to; :data:`PRIVATE` if it is not shared.
        same: for a hard link, the path of the first entry with the same inode; otherwise "".
        target: target of a symbolic link.
        attributes: extended attributes by name, values in hexadecimal digits.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int = 0
    disk: int = 0
    digest: str = ""
    copy: int = PRIVATE
    same: str = ""
    target: str = ""
    attributes: Attributes = ()

    @property
    def object(self) -> str:
        """The pool address of a file: the hash of its content, mode, owner, mtime and extended attributes.

        Files with the same address may share an inode. The address includes the mtime, because Python byte-code
        records the mtime of its source (PEP 552), and programs compare mtimes.
        """
        head = f"1 {self.digest} {self.size} {self.mode:o} {self.uid} {self.gid} {self.mtime}"
        tail = "".join(f"\n{name}={value}" for name, value in self.attributes)
        return hashlib.sha256(f"{head}{tail}".encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def object_name(self) -> str:
        """The file's name in the pool; "" if the pool does not share the file."""
        return "" if self.copy == PRIVATE else copy_name(self.object, self.copy)


_to_json = json.JSONEncoder(separators=(",", ":")).encode
_quote = json.encoder.encode_basestring_ascii


def list_digest(entries: Iterable[Entry]) -> str:
    """Return a hash of the entries that is equal in every store: ignore owners, disk blocks and pool copies."""
    digest = hashlib.sha256()
    for entry in entries:
        attributes = [pair for pair in entry.attributes if pair[0].startswith("user.")]
        row = [
            entry.path, entry.kind, entry.mode, entry.mtime, entry.size, entry.digest, entry.same, entry.target,
            attributes,
        ]  # fmt: skip
        digest.update(f"{_to_json(row)}\n".encode())
    return digest.hexdigest()


def copy_name(key: str, copy: int) -> str:
    """Return the file name of a pool object's copy."""
    return key if copy == 0 else f"{key}.{copy}"


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    """Write a list of files.

    Args:
        path: the file to create.
        entries: the entries, each directory before its contents.

    Raises:
        OSError: the file cannot be written.
    """
    with (
        path.open("xb") as file,
        gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed,
        io.BufferedWriter(compressed, _BUFFER) as lines,
    ):
        lines.write(f'{{"format":{FORMAT}}}\n'.encode())
        for entry in entries:
            lines.write(encode(entry))


def encode(entry: Entry) -> bytes:
    """Return an entry as one line of a list: a JSON array of the fields."""
    paths = f"{_quote(entry.same)},{_quote(entry.target)}" if entry.same or entry.target else '"",""'
    attributes = _to_json(entry.attributes) if entry.attributes else "[]"
    return (
        f'[{_quote(entry.path)},"{entry.kind}",{entry.mode},{entry.uid},{entry.gid},{entry.mtime},{entry.size},'
        f'{entry.disk},"{entry.digest}",{entry.copy},{paths},{attributes}]\n'
    ).encode()


def decode(line: bytes) -> Entry:
    """Parse one line of a list, and check its types, because the list may come from another machine.

    Raises:
        ValueError: the line is not an entry.
    """
    fields = json.loads(line)
    if not isinstance(fields, list) or len(fields) != len(Entry.__slots__):
        raise ValueError("a line has the wrong number of fields")
    path, kind, mode, uid, gid, mtime, size, disk, digest, copy, same, target, attributes = fields
    strings, integers = (path, kind, digest, same, target), (mode, uid, gid, mtime, size, disk, copy)
    if not all(type(text) is str for text in strings) or not all(type(integer) is int for integer in integers):
        raise ValueError("a field has the wrong type")
    if any(abs(integer) > _LARGEST for integer in integers):
        raise ValueError("a number is too large")
    pairs = tuple((name, value) for name, value in attributes)
    if kind not in KINDS or any(type(text) is not str for pair in pairs for text in pair):
        raise ValueError("a field has a value that it cannot have")
    return Entry(path, kind, mode, uid, gid, mtime, size, disk, digest, copy, same, target, pairs)


def read_entries(layer: Path, digests: frozenset[bytes] | None = None) -> Iterator[Entry]:
    """Yield the entries of a layer's list, in the order of the list.

    Args:
        layer: the layer's directory in its store.
        digests: yield only the files whose content has one of these SHA-256; None yields all entries.

    Raises:
        StoreError: the list is damaged, too large, not a regular file, or has a later format.
        FileNotFoundError: the list is missing.
    """
    list_path = f"{layer}/{NAME}"
    blocks = _blocks(read_below(layer.parent.parent, f"{layer.parent.name}/{layer.name}/{NAME}", MOST))
    try:
        first_line, _, first_block = next(blocks, b"null").partition(b"\n")
        header = json.loads(first_line)
        if header["format"] != FORMAT:
            raise StoreError(f"{list_path} has format {header['format']!r}", hint="use a later MiniSandbox")
        for block in chain((first_block,), blocks):
            if digests is None or not digests.isdisjoint(_DIGEST.findall(block)):
                for line in block.splitlines():
                    if digests is None or not digests.isdisjoint(_DIGEST.findall(line)):
                        yield decode(line)
    except (ValueError, TypeError, KeyError, EOFError, OSError, RecursionError) as error:  # OSError: damaged gzip
        raise StoreError(
            f"the list of files {list_path} is damaged", reason=str(error), hint="build the image again"
        ) from error


def _blocks(compressed: bytes) -> Iterator[bytes]:
    """Yield the lines of a list, in blocks of whole lines.

    Raises:
        ValueError: the list is larger than :data:`MOST`, a line is too long, or decompression failed.
    """
    remaining, unfinished = MOST, b""
    with gzip.GzipFile(fileobj=io.BytesIO(compressed)) as decompressed:
        try:
            while text := decompressed.read(_BUFFER):
                remaining -= len(text)
                first_line = len(unfinished) + (text.find(b"\n") + 1 or len(text))
                if first_line > _LONGEST or remaining < 0:
                    raise ValueError("it unpacks to more than a list can have")
                lines, newline, end = text.rpartition(b"\n")
                if newline:
                    yield b"".join((unfinished, lines, newline))
                    unfinished = end
                else:
                    unfinished += end
            if unfinished:
                yield unfinished
        except Exception as error:  # zlib.error, or any other exception that corrupt data causes in the reader
            raise ValueError(str(error)) from error
