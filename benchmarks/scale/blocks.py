"""The arithmetic of the store: blocks, one inode for equal files, copies where one image has a file twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

BLOCK = 4096
LIST_ROW = 50
"""Bytes of a row in a layer's compressed list of files; measured, mostly half of a SHA-256 in hexadecimal digits."""
LAYER_FILES = 3 * BLOCK
"""The directory of a layer, that of its tree, and its record; measured."""
POOL_ROW = 100
"""Bytes that a name in the pool takes in its directory: 64 digits, 8 of the entry, and what hashed directories leave
free; measured."""

Files = Iterable[tuple[Hashable, int, int]]
"""What says that two files are equal, their bytes, and how often one image has them."""


def on_disk(size: int) -> int:
    """Return the bytes of the blocks that a file takes."""
    return -(-size // BLOCK) * BLOCK


def directory_bytes(names: Iterable[int]) -> int:
    """Return what a directory takes (ext4): each entry has eight bytes and its name, to a multiple of four."""
    return max(on_disk(24 + sum(8 + -(-length // 4) * 4 for length in names)), BLOCK)


@dataclass(slots=True)
class Ledger:
    """What layers take together.

    Attributes:
        shared: for each kind of layer, files by what makes them equal: bytes and how many inodes they need.
        layers: for each kind of layer, how many there are.
        directories: for each kind of layer, the bytes of its directories.
        lists: for each kind of layer, the bytes of lists of files and records.
        names: for each kind of layer, bytes if every layer had inodes of its own.
    """

    shared: dict[str, dict[Hashable, tuple[int, int]]] = field(default_factory=dict)
    layers: Counter[str] = field(default_factory=Counter)
    directories: Counter[str] = field(default_factory=Counter)
    lists: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)

    def add_layer(
        self, kind: str, files: Files, directories: int, rows: int, below: Mapping[Hashable, int] | None = None
    ) -> None:
        """Count a layer.

        Args:
            kind: layers of one kind share files; different kinds have different times, and share none.
            files: each different one once.
            directories: bytes of the tree's directories.
            rows: how many names its list has.
            below: how often a layer of this kind below it has a file; no inode is in an image twice.
        """
        known, under = self.shared.setdefault(kind, {}), below or {}
        for key, size, count in files:
            if not size:
                continue
            before = known.get(key, (size, 0))[1]
            known[key] = (size, max(before, count + under.get(key, 0)))
            self.names[kind] += on_disk(size) * count
        self.layers[kind] += 1
        self.directories[kind] += directories
        self.lists[kind] += LAYER_FILES + on_disk(LIST_ROW * rows)

    def files(self, kind: str) -> int:
        """Bytes on disk of all files of a kind of layer, each inode once."""
        return sum(on_disk(size) * count for size, count in self.shared.get(kind, {}).values())

    def inodes(self, kind: str) -> int:
        """How many inodes the files of a kind of layer have."""
        return sum(count for _, count in self.shared.get(kind, {}).values())

    def overhead(self, kind: str) -> int:
        """Bytes of what is not files: directories, lists, records, the pool's names."""
        return self.directories[kind] + self.lists[kind] + POOL_ROW * self.inodes(kind)

    def total(self, kind: str) -> int:
        """All bytes that a kind of layer takes."""
        return self.files(kind) + self.overhead(kind)
