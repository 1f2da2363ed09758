"""What blobs of layers take of the blocks of files, by the kind of step that made the layer: on a store's real layers.

python -m benchmarks.scale.cold STORE [--most MB]

STORE is only read. Of each kind layers are drawn at random until they take so many MB, and compressed as freezing does
it. What is printed stands in measured.py.
"""

from __future__ import annotations

import argparse
import io
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from minisandbox.store import Store
from minisandbox.store.blobs.layer_blobs import COLD, tar_of
from minisandbox.store.blobs.packing import pack
from minisandbox.store.entries import read_entries

MB = 1_000_000


class Nowhere(io.RawIOBase):
    """A file that forgets what is written to it."""

    def write(self, data: object, /) -> int:
        """Take everything."""
        return len(memoryview(data))  # type: ignore[arg-type] # any buffer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, metavar="STORE", help="a store with real images")
    parser.add_argument("--most", type=float, default=150.0, metavar="MB", help="of each kind (default: 150)")
    options = parser.parse_args()
    store = Store.open(options.store, read_only=True)
    for kind, keys in sorted(by_kind(store).items()):
        count, disk, blobs = measure(store, drawn(store, keys, options.most * MB))
        print(
            f"{kind:<28} {count:7} layers {disk / MB:8.1f} MB on disk {blobs / MB:8.1f} MB in blobs  {blobs / disk:.3f}"
        )


def by_kind(store: Store) -> Mapping[str, list[str]]:
    """Return the keys of a store's plain layers by the kind of step that made them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for record in store.layers():
        if not store.is_frozen(record.key):
            found[str(record.step.get("kind", "?"))].append(record.key)
    return found


def drawn(store: Store, keys: Sequence[str], most: float) -> Iterator[str]:
    """Yield layers drawn at random until they have so many bytes."""
    size = 0.0
    for key in random.Random(1).sample(list(keys), len(keys)):
        if size > most:
            return
        size += store.layer(key).bytes
        yield key


def measure(store: Store, keys: Iterator[str]) -> tuple[int, int, int]:
    """Return how many layers there are, the bytes of their files' blocks, and those of their blobs."""
    count = disk = blobs = 0
    for key in keys:
        count += 1
        disk += sum(entry.disk for entry in read_entries(store.layer_directory(key)) if not entry.same)
        blobs += pack(tar_of(store.root, key), COLD, cast("IO[bytes]", Nowhere())).size
    return count, max(disk, 1), blobs


if __name__ == "__main__":
    main()
