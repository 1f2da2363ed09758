"""Git objects: the trees of commits, and what their objects take as files and in packs."""

from __future__ import annotations

import gzip
import json
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.store.disk.durable import write_atomic

ABSENT = 3_000_000
"""What a blob counts with that a snapshot of a repository lacks: those are its largest ones."""
GITLINK = "160000"
LINK = "120000"

PACK, LOOSE, BEST = "pack", "loose", "best"
"""In a pack without deltas; a file of its own as git writes it; the same compressed as well as it can be."""
_PACK_HEAD = 2
_LEVELS = {PACK: -1, LOOSE: 1, BEST: 9}  # git-config(1): pack.compression, core.looseCompression; repository.sh


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
        sizes: by :data:`PACK`, :data:`LOOSE` and :data:`BEST`, the bytes of an object by its name.
    """

    path: Path
    kept: Path
    sizes: dict[str, dict[str, int]] = field(default_factory=lambda: {way: {} for way in _LEVELS})

    def __post_init__(self) -> None:
        with suppress(FileNotFoundError):
            self.sizes = json.loads(gzip.decompress(self.kept.read_bytes()))

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

    def measure(self, objects: Iterable[Object], *ways: str) -> None:
        """Compress what is not yet known; what a snapshot lacks counts with the size that its tree gives, halved.

        Args:
            objects: of a tree.
            ways: which sizes are wanted.
        """
        known = [self.sizes[way] for way in ways]
        wanted = {
            one.name: one.size
            for one in objects
            if one.mode != GITLINK and any(one.name not in sizes for sizes in known)
        }
        if not wanted:
            return
        for name, kind, data in self._read(wanted):
            for way in ways:
                if name not in self.sizes[way]:
                    self.sizes[way][name] = wanted[name] // 2 if data is None else compressed(kind, data, way)
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.kept, gzip.compress(json.dumps(self.sizes).encode(), 1, mtime=0))

    @property
    def _git(self) -> tuple[str, ...]:
        return ("git", "-c", "safe.directory=*", f"--git-dir={self.path}")

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, str, bytes | None]]:
        """Yield objects with their kind and content; None for what is not there."""
        command = [*self._git, "cat-file", "--batch"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for name in names:
                process.stdin.write(f"{name}\n".encode())
                process.stdin.flush()
                head = process.stdout.readline().split()
                if head[1] == b"missing":
                    yield name, "", None
                    continue
                yield name, head[1].decode(), process.stdout.read(int(head[2]) + 1)[:-1]
            process.stdin.close()


def compressed(kind: str, data: bytes, way: str) -> int:
    """Return the bytes that an object takes: in a pack, or as a file, whose first bytes say what it is."""
    if way == PACK:
        return _PACK_HEAD + len(zlib.compress(data))
    return len(zlib.compress(f"{kind} {len(data)}\0".encode() + data, _LEVELS[way]))


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
