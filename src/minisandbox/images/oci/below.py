"""The layers below the one that is unpacked, as a sandbox would see them: which paths they show."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from minisandbox.images.oci.tarstream import DIRECTORY, Member
from minisandbox.store.entries import WHITEOUT
from minisandbox.store.scanning import kind_of

_OPAQUE = "user.overlay.opaque"


@dataclass(frozen=True, slots=True)
class Below:
    """Trees of layers.

    Attributes:
        trees: their directories, topmost first.
    """

    trees: tuple[Path, ...] = ()

    def shows(self, path: tuple[str, ...]) -> bool:
        """Whether there is anything at a path; if that cannot be found out, yes."""
        try:
            return self._status(path) is not None
        except PermissionError:  # a directory that is closed to its owner
            return True

    def directory(self, path: tuple[str, ...]) -> Member:
        """Return the attributes of a directory that a layer has without describing it: those it had below."""
        found = None
        with contextlib.suppress(PermissionError):
            found = self._status(path)
        if found is None or not stat.S_ISDIR(found.st_mode):
            return Member(b"", DIRECTORY, 0o755, 0, 0, 0, 0)
        return Member(b"", DIRECTORY, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, 0)

    def _status(self, path: tuple[str, ...]) -> os.stat_result | None:
        for tree in self.trees:
            found, hidden = look(tree, path)
            if found is not None or hidden:
                return found
        return None


def look(tree: Path, path: tuple[str, ...]) -> tuple[os.stat_result | None, bool]:
    """Return what one layer has at a path, and whether it hides those below; no link is followed."""
    place, opaque = os.fspath(tree), False
    info = os.lstat(place)
    for part in path:
        if not stat.S_ISDIR(info.st_mode):
            return None, True
        place = f"{place}/{part}"
        opaque = opaque or is_opaque(os.path.dirname(place))
        try:
            info = os.lstat(place)
        except FileNotFoundError:
            return None, opaque
    return (None, True) if kind_of(info) == WHITEOUT else (info, False)


def is_opaque(directory: str) -> bool:
    """Whether a directory of a layer hides what lower layers have in it."""
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
