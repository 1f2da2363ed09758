"""What packs take of the blocks of files, by the kind of step that made their layer: measured on a store's real layers.

python -m benchmarks.scale.cold STORE [--most MB] [--directory DIR]

STORE is only read. Of each kind layers are drawn at random until their different contents have so many MB, and written
to packs as freezing writes them, in a directory that is removed. What is printed stands in measured.py.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.store.packs import Packs, Piece, cut

from minisandbox.store import Store
from minisandbox.store.entries import FILE, Entry, read_entries

MB = 1_000_000
BYTECODE = ".pyc"


@dataclass(frozen=True, slots=True)
class Ratio:
    """What packs take of one kind of files.

    Attributes:
        files: how many were packed.
        disk: bytes of their blocks.
        packed: bytes of the packs.
    """

    files: int
    disk: int
    packed: int

    @property
    def value(self) -> float:
        """Bytes in packs for each byte on disk."""
        return self.packed / max(self.disk, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, metavar="STORE", help="a store with real images")
    parser.add_argument("--most", type=float, default=150.0, metavar="MB", help="of each kind (default: 150)")
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where packs are written (default: home)")
    options = parser.parse_args()
    store = Store.open(options.store, read_only=True)
    with tempfile.TemporaryDirectory(prefix="minisandbox-cold-", dir=options.directory) as place:
        for kind, ratio in measure(store, options.most * MB, Path(place)):
            numbers = f"{ratio.files:7} files {ratio.disk / MB:8.1f} MB on disk {ratio.packed / MB:8.1f} MB in packs"
            print(f"{kind:<28} {numbers}  {ratio.value:.3f}", flush=True)


def measure(store: Store, most: float, place: Path) -> Iterator[tuple[str, Ratio]]:
    """Yield what packs take of each kind of layer; of packages' byte code and other files apart."""
    for kind, keys in sorted(by_kind(store).items()):
        chosen = list(drawn(store, keys, most))
        code = [each for each in chosen if each[1].path.endswith(BYTECODE)]
        yield kind, packed(store, chosen, place)
        if kind == "requirements":
            yield f"{kind}, byte code", packed(store, code, place)
            yield f"{kind}, the rest", packed(store, [each for each in chosen if each not in set(code)], place)


def by_kind(store: Store) -> Mapping[str, list[str]]:
    """Return the keys of a store's plain layers by the kind of step that made them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for record in store.layers():
        if not store.is_frozen(record.key):
            found[str(record.step.get("kind", "?"))].append(record.key)
    return found


def drawn(store: Store, keys: Sequence[str], most: float) -> Iterator[tuple[str, Entry]]:
    """Yield (layer, file) for each different content of layers drawn at random."""
    seen: set[str] = set()
    size = 0
    for key in random.Random(1).sample(list(keys), len(keys)):
        if size > most:
            return
        for entry in read_entries(store.layer_directory(key)):
            if entry.kind == FILE and entry.size and not entry.same and entry.digest not in seen:
                seen.add(entry.digest)
                size += entry.size
                yield key, entry


def packed(store: Store, chosen: Sequence[tuple[str, Entry]], place: Path) -> Ratio:
    """Write contents to packs, and measure these."""
    packs = Packs(place)
    pieces = [Piece(entry.digest, entry.size, store.layer_tree(key) / entry.path) for key, entry in chosen]
    taken = 0
    for portion in cut(pieces):
        pack = packs.write(portion)
        taken += pack.taken
        packs.remove(pack)
    return Ratio(len(chosen), sum(entry.disk for _, entry in chosen), taken)


if __name__ == "__main__":
    main()
