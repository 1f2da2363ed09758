"""Stacked layers read by the host: which paths they show, as overlayfs would, and what is there."""

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
class Below:
    """Trees of layers.

    Attributes:
        trees: their directories, topmost first.
        closed: whether a link that leads upwards out of them is an error; the root of an image is its own parent.
    """

    trees: tuple[Path, ...] = ()
    closed: bool = False

    def shows(self, path: tuple[str, ...]) -> bool:
        """Return whether a path exists; True if that cannot be determined."""
        try:
            return self.find(path) is not None
        except PermissionError:  # a directory that is closed to its owner
            return True

    def directory(self, path: tuple[str, ...]) -> Member:
        """Return the attributes of a directory that a layer has without describing it: those it had below."""
        location = None
        with contextlib.suppress(PermissionError):
            location = self.find(path)
        if location is None or not stat.S_ISDIR(location[1].st_mode):
            return Member(b"", DIRECTORY, 0o755, 0, 0, 0, 0)
        info = location[1]
        return Member(b"", DIRECTORY, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns, 0)

    def find(self, path: tuple[str, ...]) -> tuple[str, os.stat_result] | None:
        """Return where a path lies on this machine, and its status; None where nothing is. No link is followed.

        Raises:
            PermissionError: a directory on the way is closed to its owner.
        """
        for tree in self.trees:
            location, info, hidden = _look(tree, path)
            if info is not None:
                return location, info
            if hidden:
                return None
        return None

    def status(self, path: tuple[str, ...]) -> os.stat_result | None:
        """Return the status of a path; None if nothing is."""
        location = self.find(path)
        return None if location is None else location[1]

    def link(self, path: tuple[str, ...]) -> str:
        """Return where a link leads."""
        return os.readlink(self._place(path))

    def open(self, path: tuple[str, ...]) -> io.BufferedReader:
        """Open a file."""
        return os.fdopen(os.open(self._place(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def attributes(self, path: tuple[str, ...]) -> dict[str, bytes]:
        """Return the extended attributes of a path, without overlayfs's own."""
        return attributes_of(self._place(path))

    def _place(self, path: tuple[str, ...]) -> str:
        location = self.find(path)
        if location is None:
            raise FileNotFoundError("/".join(path))
        return location[0]

    def names(self, path: tuple[str, ...]) -> list[str]:
        """Return the names in a directory, sorted.

        Raises:
            PermissionError: the directory, or one on the way, is closed to its owner.
        """
        seen: dict[str, bool] = {}
        for tree in self.trees:
            directory, info, hidden = _look(tree, path)
            if info is not None and not stat.S_ISDIR(info.st_mode):
                break
            if info is not None:
                for entry in os.scandir(directory):
                    seen.setdefault(entry.name, kind_of(entry.stat(follow_symlinks=False)) != WHITEOUT)
            if hidden or (info is not None and _is_opaque(directory)):
                break
        return sorted(name for name, shown in seen.items() if shown)


def attributes_of(path: str) -> dict[str, bytes]:
    """Return the extended attributes that layers keep, without overlayfs's own."""
    return {name: bytes.fromhex(value) for name, value in read_attributes(path) if not name.startswith("user.overlay.")}


def _look(tree: Path, path: tuple[str, ...]) -> tuple[str, os.stat_result | None, bool]:
    """Return where one layer has a path, its status, and whether it hides lower layers; follows no link."""
    location, opaque = os.fspath(tree), False
    info = os.lstat(location)
    for part in path:
        if not stat.S_ISDIR(info.st_mode):
            return location, None, True
        location = f"{location}/{part}"
        opaque = opaque or _is_opaque(os.path.dirname(location))
        try:
            info = os.lstat(location)
        except FileNotFoundError:
            return location, None, opaque
    return (location, None, True) if kind_of(info) == WHITEOUT else (location, info, opaque)


def _is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
