"""What the sources of tasks take: trees, the repository inside each image, and its index, counted from git objects.

The repository inside is modelled as ``images/scripts/task.sh`` makes it: one commit, its objects in pieces whose
borders depend on their names alone, so that equal pieces of different tasks are one file in the store.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.scale.blocks import Ledger, directory_bytes

from minisandbox.store.durable import write_atomic

_PACK, _PACK_HEAD, _INDEX_HEAD, _INDEX_ROW = 32, 2, 1072, 28  # gitformat-pack(5): header and trailer; version 2 index
_ENTRY, _TREE_ROW = 62, 30  # gitformat-index(5): an entry without its path; a row of the cached trees
_DIGITS = "0123456789abcdef"
ABSENT = 3_000_000
"""What a blob counts with that a snapshot of a repository lacks: those are its largest ones."""
_GITLINK = "160000"
_LINK = "120000"


@dataclass(frozen=True, slots=True)
class Object:
    """One line of ``git ls-tree -r -t -l``.

    Attributes:
        mode: "100644" and so on.
        kind: "blob", "tree" or "commit" (a submodule).
        name: its hash.
        size: bytes; 0 for what is no blob.
        path: in the tree.
    """

    mode: str
    kind: str
    name: str
    size: int
    path: str


@dataclass(slots=True)
class Repository:
    """A git repository with the commits of tasks, and what its objects take compressed.

    Attributes:
        path: its git directory.
        kept: the file that compressed sizes are kept in.
        packed: the bytes that an object takes in a pack without deltas, by its name.
    """

    path: Path
    kept: Path
    packed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(FileNotFoundError):
            self.packed = json.loads(gzip.decompress(self.kept.read_bytes()))

    def resolve(self, commit: str) -> str | None:
        """Return the full name of a commit, or None if it is not there."""
        command = [*self._git, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    def tree(self, commit: str) -> list[Object]:
        """Return everything in a commit's tree, each directory before what is in it; the root itself first."""
        text = subprocess.check_output([*self._git, "ls-tree", "-r", "-t", "-l", "-z", "--full-tree", commit])
        root = subprocess.check_output([*self._git, "rev-parse", f"{commit}^{{tree}}"], text=True).strip()
        return [Object("040000", "tree", root, 0, ""), *parse_tree(text)]

    def measure(self, objects: Iterable[Object]) -> None:
        """Compress what is not yet known; what a snapshot lacks counts with the size that its tree gives, halved."""
        wanted = {one.name: one.size for one in objects if one.kind != "commit" and one.name not in self.packed}
        if not wanted:
            return
        for name, data in self._read(wanted):
            self.packed[name] = wanted[name] // 2 if data is None else _PACK_HEAD + len(zlib.compress(data))
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.kept, gzip.compress(json.dumps(self.packed).encode(), 1, mtime=0))

    @property
    def _git(self) -> tuple[str, ...]:
        return ("git", "-c", "safe.directory=*", f"--git-dir={self.path}")

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield objects with their content; None for what is not there."""
        command = [*self._git, "cat-file", "--batch"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for name in names:
                process.stdin.write(f"{name}\n".encode())
                process.stdin.flush()
                head = process.stdout.readline().split()
                if head[1] == b"missing":
                    yield name, None
                    continue
                yield name, process.stdout.read(int(head[2]) + 1)[:-1]
            process.stdin.close()


def parse_tree(text: bytes) -> Iterator[Object]:
    """Yield the lines of ``git ls-tree -r -t -l -z``."""
    for line in text.decode("utf-8", "surrogateescape").split("\0"):
        if line:
            head, path = line.split("\t", 1)
            mode, kind, name, size = head.split()
            yield Object(mode, kind, name, _size(size), path)


def _size(text: str) -> int:
    if text == "-":  # no blob
        return 0
    return int(text) if text.isdecimal() else ABSENT  # "BAD": git does not have the object


def pieces(objects: Iterable[Object]) -> list[tuple[str, ...]]:
    """Return the packs that task.sh makes of a tree: the names of the objects in each; the first lacks the commit.

    Args:
        objects: of one tree, the root first.
    """
    listed = list({one.name: one.kind for one in objects if one.kind != "commit"}.items())
    every = 8
    while every * 64 < len(listed) + 1:  # with the commit
        every *= 2
    done: list[tuple[str, ...]] = [(listed[0][0],)]
    open_ones: dict[str, list[str]] = {}
    for name, kind in listed[1:]:
        piece = open_ones.setdefault(kind, [])
        if border(name) % every == 0 and piece:
            done.append(tuple(piece))
            piece.clear()
        piece.append(name)
    return done + [tuple(piece) for piece in open_ones.values()]


def border(name: str) -> int:
    """The number that task.sh makes of an object's first three digits (awk counts from one)."""
    first, second, third = (_DIGITS.index(digit) + 1 for digit in name[:3])
    return first * 256 + second * 16 + third


def index_bytes(objects: Iterable[Object]) -> int:
    """The size of git's index of a tree: a multiple of eight bytes for each entry, and the trees that it caches."""
    total = 12 + 20 + 8
    for one in objects:
        length = len(one.path.encode("utf-8", "surrogateescape"))
        if one.kind == "tree":
            total += _TREE_ROW + len(one.path.rpartition("/")[2])
        else:
            total += (_ENTRY + length) // 8 * 8 + 8
    return total


def add_source(ledger: Ledger, objects: list[Object]) -> None:
    """Count the layer of a source: its files and directories."""
    files: Counter[tuple[str, bool]] = Counter()
    sizes: dict[tuple[str, bool], int] = {}
    for one in objects:
        if one.kind == "blob" and one.mode != _LINK:
            key = (one.name, one.mode == "100755")
            files[key] += 1
            sizes[key] = one.size
    ledger.add_layer(
        "source", ((("blob", *key), sizes[key], count) for key, count in files.items()), folders(objects), len(objects)
    )


def add_repository(ledger: Ledger, repository: Repository, objects: list[Object], task: str) -> None:
    """Count the layer of a task: the repository inside."""
    repository.measure(objects)
    packs = pieces(objects)
    files: list[tuple[tuple[object, ...], int, int]] = []
    for number, piece in enumerate(packs):
        count = len(piece) + (number == 0)
        packed = sum(repository.packed[name] for name in piece) + (150 if number == 0 else 0)
        owner = (task,) if number == 0 else ()
        files.append((("pack", *owner, piece), _PACK + packed, 1))
        files.append((("idx", *owner, piece), _INDEX_HEAD + _INDEX_ROW * count, 1))
    files += [(("index", task), index_bytes(objects), 1), (("head", task), 41, 1)]
    files += [(("git", name), 100, 1) for name in ("HEAD", "config", "exclude")]
    directories = 9 * directory_bytes(()) + directory_bytes([64] * 2 * len(packs)) - directory_bytes(())
    ledger.add_layer("repository", files, directories, len(files))


def folders(objects: Iterable[Object]) -> int:
    """The bytes of a tree's directories."""
    names: dict[str, list[int]] = {"": []}
    for one in objects:
        if not one.path:
            continue
        parent, _, name = one.path.rpartition("/")
        names.setdefault(parent, []).append(len(name.encode("utf-8", "surrogateescape")))
        if one.kind == "tree" or one.mode == _GITLINK:
            names.setdefault(one.path, [])
    return sum(directory_bytes(lengths) for lengths in names.values())
