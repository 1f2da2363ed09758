"""A file tree in a few lines: what a sandbox's files must look like after a sequence of operations."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from minisandbox.types import ChangeKind, FileType


class RefusedError(Exception):
    """The operation fails, in the model as in a sandbox."""


@dataclass(frozen=True, slots=True)
class Node:
    """One path.

    Attributes:
        type: a file, directory or link.
        content: bytes of a file, target of a link.
        mode: permission bits.
    """

    type: FileType
    content: bytes = b""
    mode: int = 0o644


DIRECTORY = Node(FileType.DIRECTORY, mode=0o755)


def parent(path: str) -> str:
    """The directory that a path is in; empty for the workdir."""
    return path.rpartition("/")[0]


class Tree:
    """Files by their paths, relative to the workdir."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def copy(self) -> Tree:
        """Another tree with the same files."""
        return copy.deepcopy(self)

    def below(self, path: str) -> list[str]:
        """What lies in a directory, at any depth."""
        return [name for name in self.nodes if name.startswith(f"{path}/")] if path else list(self.nodes)

    def children(self, path: str) -> list[str]:
        """Names in a directory."""
        if path and self.look(path).type is not FileType.DIRECTORY:
            raise RefusedError(path)
        return sorted(name.rpartition("/")[2] for name in self.nodes if parent(name) == path)

    def look(self, path: str) -> Node:
        """What a path is."""
        if path not in self.nodes:
            raise RefusedError(path)
        return self.nodes[path]

    def is_directory(self, path: str) -> bool:
        """Whether a path is one; the workdir is."""
        return not path or (path in self.nodes and self.nodes[path].type is FileType.DIRECTORY)

    def make_directories(self, path: str) -> None:
        """``mkdir -p``."""
        if self.is_directory(path):
            return
        self.make_directories(parent(path))
        if path in self.nodes:
            raise RefusedError(path)
        self.nodes[path] = DIRECTORY

    def make_directory(self, path: str, mode: int) -> None:
        """``files.mkdir``."""
        if not self.is_directory(path):
            self.make_directories(path)
            self.nodes[path] = Node(FileType.DIRECTORY, mode=mode)

    def read(self, path: str) -> bytes:
        """``files.read_bytes``."""
        node = self.look(path)
        if node.type is not FileType.FILE:
            raise RefusedError(path)
        return node.content

    def write(self, path: str, content: bytes, mode: int | None) -> None:
        """``files.write_bytes``."""
        self.make_directories(parent(path))
        old = self.nodes.get(path)
        if old is not None and old.type is not FileType.FILE:
            raise RefusedError(path)
        self.nodes[path] = Node(FileType.FILE, content, mode or (old.mode if old else 0o644))

    def append(self, path: str, content: bytes) -> None:
        """``printf >>``: parents are not made."""
        if not self.is_directory(parent(path)):
            raise RefusedError(path)
        self.write(path, (self.read(path) if path in self.nodes else b"") + content, None)

    def link(self, path: str, target: str) -> None:
        """``ln -s`` of what is not there yet."""
        if path in self.nodes or not self.is_directory(parent(path)):
            raise RefusedError(path)
        self.nodes[path] = Node(FileType.SYMLINK, target.encode(), 0o777)

    def change_mode(self, path: str, mode: int) -> None:
        """``chmod``."""
        node = self.look(path)
        self.nodes[path] = Node(node.type, node.content, mode)

    def remove(self, path: str, *, recursive: bool, missing_ok: bool = False) -> None:
        """``files.remove``."""
        if path not in self.nodes:
            if missing_ok:
                return
            raise RefusedError(path)
        below = self.below(path)
        if below and not recursive:
            raise RefusedError(path)
        for name in (path, *below):
            del self.nodes[name]

    def move(self, source: str, target: str) -> None:
        """``files.move``: rename(2), with the target's parents made."""
        moved, old = self.look(source), self.nodes.get(target)
        if source == target:
            return
        if target.startswith(f"{source}/"):
            raise RefusedError(target)
        self.make_directories(parent(target))
        into = moved.type is FileType.DIRECTORY
        if old is not None and ((old.type is FileType.DIRECTORY) is not into or self.below(target)):
            raise RefusedError(target)
        for name in (source, *self.below(source)):
            self.nodes[target + name[len(source) :]] = self.nodes.pop(name)

    def copy_file(self, source: str, target: str) -> None:
        """``cp -p -T`` of a file."""
        content, mode = self.read(source), self.look(source).mode
        if not self.is_directory(parent(target)) or self.is_directory(target) or source == target:
            raise RefusedError(target)
        self.nodes.pop(target, None)
        self.nodes[target] = Node(FileType.FILE, content, mode)

    def changes(self, image: Tree) -> dict[str, tuple[ChangeKind, FileType]]:
        """What differs from another tree."""
        found = {}
        for path in self.nodes.keys() | image.nodes.keys():
            was, now = image.nodes.get(path), self.nodes.get(path)
            if now is None and was is not None:
                found[path] = (ChangeKind.DELETED, was.type)
            elif was is None and now is not None:
                found[path] = (ChangeKind.ADDED, now.type)
            elif was != now and now is not None:
                found[path] = (ChangeKind.MODIFIED, now.type)
        return found
