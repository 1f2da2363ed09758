"""Read the files of an image on the host: merge its layers, and resolve links within the image only."""

from __future__ import annotations

import io
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from minisandbox.store.blobs.lower_layers import LowerLayers

Parts = tuple[str, ...]
_MOST_LINKS = 40  # path_resolution(7)


class LinkError(Exception):
    """A path cannot be resolved: it is missing, leads out of its tree, or contains a cycle of links."""


class FileTree(Protocol):
    """A tree of untrusted files."""

    @property
    def closed(self) -> bool:
        """Return whether a ``..`` above the root is an error; in an image, the parent of the root is the root."""

    def status(self, path: Parts) -> os.stat_result | None:
        """Return the status of a path, or None if it is missing. Its parent directories must not be links."""

    def names(self, path: Parts) -> list[str]:
        """Return the names in a directory, sorted."""

    def link(self, path: Parts) -> str:
        """Return the target of a link."""

    def open(self, path: Parts) -> io.BufferedReader:
        """Open a file."""

    def attributes(self, path: Parts) -> dict[str, bytes]:
        """Return the extended attributes of a path."""


@dataclass(frozen=True, slots=True)
class ImageTree:
    """The merged files of immutable layers. Paths are absolute in the image; unreadable files count as missing.

    Attributes:
        files: the merged layers.
    """

    files: LowerLayers

    def resolve(self, path: str) -> Parts | None:
        """Return the parts of a path with links resolved; None if the path is missing or unreadable."""
        with suppress(OSError, LinkError):
            return resolve(self.files, tuple(part for part in path.split("/") if part not in ("", ".")), strict=True)
        return None

    def has(self, path: str) -> bool:
        """Return whether a path exists; a dangling link counts as existing."""
        folder, _, name = path.rstrip("/").rpartition("/")
        parent = self.resolve(folder)
        return parent is not None and self._status((*parent, name)) is not None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; empty if there is no directory."""
        resolved = self.resolve(path)
        with suppress(OSError):
            return [] if resolved is None else self.files.names(resolved)
        return []

    def read(self, path: str, limit: int = 16 << 20) -> bytes:
        """Return the beginning of a regular file; empty for any other path.

        Args:
            path: the file.
            limit: the maximum number of bytes.
        """
        resolved = self.resolve(path)
        status = None if resolved is None else self._status(resolved)
        if resolved is not None and status is not None and stat.S_ISREG(status.st_mode):
            with suppress(OSError), self.files.open(resolved) as file:
                return file.read(limit)
        return b""

    def _status(self, path: Parts) -> os.stat_result | None:
        with suppress(OSError):
            return self.files.status(path)
        return None


def resolve(tree: FileTree, path: Parts, *, strict: bool = False) -> Parts:
    """Return a path with all links resolved.

    Args:
        tree: the tree.
        path: the path.
        strict: whether every part of the path must exist; otherwise missing parts stay unchanged.

    Raises:
        LinkError: the path leads out of a build context, contains a cycle of links, or, if strict, does not exist.
    """
    resolved: list[str] = []
    pending, link_count = list(reversed(path)), 0
    while pending:
        name = pending.pop()
        if name == "..":
            if not resolved and tree.closed:
                raise LinkError("a link on its way leads out of the context")
            resolved[-1:] = []
            continue
        resolved.append(name)
        status = tree.status(tuple(resolved))
        if strict and status is None:
            raise LinkError("nothing is there")
        if status is None or not stat.S_ISLNK(status.st_mode):
            continue
        link_count += 1
        if link_count > _MOST_LINKS:
            raise LinkError(f"it lies behind more than {_MOST_LINKS} links")
        target = tree.link(tuple(resolved))
        if target.startswith("/"):
            resolved.clear()
        else:
            resolved.pop()
        pending += [target_name for target_name in reversed(target.split("/")) if target_name not in ("", ".")]
    return tuple(resolved)
