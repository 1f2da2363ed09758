"""Read stacked layers on the host without a mount, resolving whiteouts and opaque directories as overlayfs does."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from minisandbox.store.blobs.tarstream import DIRECTORY, Member
from minisandbox.store.disk.scanning import kind_of, read_attributes
from minisandbox.store.entries import WHITEOUT

_OPAQUE = "user.overlay.opaque"


@dataclass(frozen=True, slots=True)
class LowerLayers:
    """Merged view of the trees of stacked layers.

    Attributes:
        trees: directories of the trees, topmost first.
        closed: whether a link that leads above the root of the trees is an error. It is False for the root of an
            image, because ``/..`` is ``/``.
    """

    trees: tuple[Path, ...] = ()
    closed: bool = False

    def shows(self, path: tuple[str, ...]) -> bool:
        """Return whether a path exists; assume that a path in an unreadable directory exists."""
        try:
            return self.find(path) is not None
        except PermissionError:  # the owner has no permission to read a directory
            return True

    def directory(self, path: tuple[str, ...]) -> Member:
        """Return the metadata of a directory, for an upper layer whose archive has no entry for it."""
        location = None
        with contextlib.suppress(PermissionError):
            location = self.find(path)
        if location is None or not stat.S_ISDIR(location[1].st_mode):
            return Member(b"", DIRECTORY, 0o755, 0, 0, 0, 0)
        status = location[1]
        return Member(b"", DIRECTORY, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, 0)

    def find(self, path: tuple[str, ...]) -> tuple[str, os.stat_result] | None:
        """Return (host path, status), or None if the path does not exist. Links are not followed.

        Raises:
            PermissionError: the mode of a parent directory denies access to its owner.
        """
        for tree in self.trees:
            location, status, is_hidden = _look(tree, path)
            if status is not None:
                return location, status
            if is_hidden:
                return None
        return None

    def status(self, path: tuple[str, ...]) -> os.stat_result | None:
        """Return the status of a path, or None if the path does not exist."""
        location = self.find(path)
        return None if location is None else location[1]

    def link(self, path: tuple[str, ...]) -> str:
        """Return the target of a link."""
        return os.readlink(self._place(path))

    def open(self, path: tuple[str, ...]) -> io.BufferedReader:
        """Open a file for reading."""
        return os.fdopen(os.open(self._place(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def attributes(self, path: tuple[str, ...]) -> dict[str, bytes]:
        """Return the extended attributes of a path, without those of overlayfs."""
        return attributes_of(self._place(path))

    def _place(self, path: tuple[str, ...]) -> str:
        location = self.find(path)
        if location is None:
            raise FileNotFoundError("/".join(path))
        return location[0]

    def names(self, path: tuple[str, ...]) -> list[str]:
        """Return the names in a directory, sorted.

        Raises:
            PermissionError: the mode of the directory or a parent directory denies access to its owner.
        """
        visible_by_name: dict[str, bool] = {}
        for tree in self.trees:
            directory, status, is_hidden = _look(tree, path)
            if status is not None and not stat.S_ISDIR(status.st_mode):
                break
            if status is not None:
                for entry in os.scandir(directory):
                    visible_by_name.setdefault(entry.name, kind_of(entry.stat(follow_symlinks=False)) != WHITEOUT)
            if is_hidden or (status is not None and _is_opaque(directory)):
                break
        return sorted(name for name, is_visible in visible_by_name.items() if is_visible)


def attributes_of(path: str) -> dict[str, bytes]:
    """Return the extended attributes that layers keep, without those of overlayfs."""
    return {name: bytes.fromhex(value) for name, value in read_attributes(path) if not name.startswith("user.overlay.")}


def _look(tree: Path, path: tuple[str, ...]) -> tuple[str, os.stat_result | None, bool]:
    """Look up a path in one layer without following links.

    Returns:
        The host path; its status, or None if the layer has no such path; and whether the layer hides this path of
        the layers below.
    """
    location, is_hidden = os.fspath(tree), False
    status = os.lstat(location)
    for part in path:
        if not stat.S_ISDIR(status.st_mode):
            return location, None, True
        location = f"{location}/{part}"
        is_hidden = is_hidden or _is_opaque(os.path.dirname(location))
        try:
            status = os.lstat(location)
        except FileNotFoundError:
            return location, None, is_hidden
    return (location, None, True) if kind_of(status) == WHITEOUT else (location, status, is_hidden)


def _is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
