"""A layer's tree made from the list of its files and their contents: one that was imported, or one that was frozen."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from minisandbox.store.entries import DIRECTORY, FIFO, FILE, LINK, SOCKET, WHITEOUT, Entry

_CHUNK = 1 << 20
_SPECIAL = {WHITEOUT: stat.S_IFCHR, FIFO: stat.S_IFIFO, SOCKET: stat.S_IFSOCK}


class Readable(Protocol):
    """What a content is read from."""

    def read(self, size: int, /) -> bytes:
        """Return at most so many bytes; none at the end."""


def write_content(path: Path, source: Readable, digest: str, size: int) -> bool:
    """Write a content to a new file.

    Args:
        path: the file.
        source: where it comes from.
        digest: its SHA-256.
        size: its bytes.

    Returns:
        Whether it was what its hash says.

    Raises:
        OSError: it cannot be written.
    """
    hashed, left = hashlib.sha256(), size
    with path.open("xb") as file:
        while chunk := source.read(min(_CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                break
            hashed.update(chunk)
            file.write(chunk)
    return not left and hashed.hexdigest() == digest


@dataclass(slots=True)
class Growth:
    """A layer's tree as it grows from its entries; every parent is a directory made here, none a link.

    Attributes:
        tree: where it is made; not there yet.
        contents: a directory with contents by their hashes, on the same file system.
        placed: the contents whose own file is in a tree already.
    """

    tree: Path
    contents: Path
    placed: set[str] = field(default_factory=set)

    def run(self, entries: list[Entry], link: Callable[[Entry], bool]) -> list[Entry]:
        """Make everything; return the entries with the bytes that they take."""
        self.grow(entries, link)
        self.settle_directories(entries)
        return [dataclasses.replace(entry, disk=os.lstat(self.path(entry)).st_blocks * 512) for entry in entries]

    def grow(self, entries: list[Entry], link: Callable[[Entry], bool]) -> None:
        """Make everything; directories are open to their owner until they are settled.

        Args:
            entries: each directory before what is in it, each inode before further names of it.
            link: puts a file there out of the pool, if that has it.
        """
        for entry in entries:
            path = self.path(entry)
            if entry.same:
                os.link(f"{self.tree}/{entry.same}", path, follow_symlinks=False)
            elif entry.kind == DIRECTORY:
                os.mkdir(path, 0o700)
            elif entry.kind != FILE or not link(entry):
                self._make(entry, path)
                _settle(entry, path)

    def settle_directories(self, entries: list[Entry]) -> None:
        """Give directories their attributes, owners, modes and mtimes: nothing is made in them any more."""
        for entry in reversed(entries):
            if entry.kind == DIRECTORY:
                _settle(entry, self.path(entry))

    def is_settled(self, entry: Entry) -> bool:
        """Whether a directory has its mode and its mtime."""
        info = os.lstat(self.path(entry))
        return (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (entry.mode, entry.mtime)

    def path(self, entry: Entry) -> str:
        """Where an entry is in the tree."""
        return f"{self.tree}/{entry.path}" if entry.path else str(self.tree)

    def _make(self, entry: Entry, path: str) -> None:
        if entry.kind == FILE:
            self._place(self.contents / entry.digest, entry, path)
        elif entry.kind == LINK:
            os.symlink(entry.target, path)
        else:
            os.mknod(path, _SPECIAL[entry.kind] | 0o600, 0)

    def _place(self, content: Path, entry: Entry, path: str) -> None:
        """Put a content where a file is to be: the first file that has it gets its inode, the others copies."""
        if entry.digest in self.placed or not entry.mode & stat.S_IRUSR:
            shutil.copyfile(content, path)
        else:
            self.placed.add(entry.digest)
            os.link(content, path, follow_symlinks=False)


def _settle(entry: Entry, path: str) -> None:
    """Give what was made its owner, attributes, mode and mtime, in the order in which none undoes another.

    chown(2) takes capabilities away, chmod and writing take setuid away.
    """
    os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    if entry.kind in (FILE, DIRECTORY):
        for name, value in entry.attributes:
            os.setxattr(path, name, bytes.fromhex(value), follow_symlinks=False)
    if entry.kind != LINK:
        os.chmod(path, entry.mode)
    os.utime(path, ns=(entry.mtime, entry.mtime), follow_symlinks=False)
