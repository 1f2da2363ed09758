"""The files of an image, read by the host: layers merged, links resolved inside the image, never followed out of it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from minisandbox.images.oci.below import is_opaque, look
from minisandbox.store.entries import WHITEOUT
from minisandbox.store.scanning import kind_of

_MOST_LINKS = 40  # as the kernel: path_resolution(7)


@dataclass(frozen=True, slots=True)
class ImageTree:
    """Trees of layers that nobody changes meanwhile. Paths are absolute paths of the image.

    Attributes:
        trees: their directories, topmost first.
    """

    trees: tuple[Path, ...]

    def resolve(self, path: str) -> str | None:
        """Return a path without links; None where there is nothing, or nothing that can be reached."""
        done: list[str] = []
        todo = path.split("/")[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
            elif part not in ("", "."):
                done.append(part)
                place, info = self._find(done)
                if info is None:
                    return None
                if stat.S_ISLNK(info.st_mode):
                    links += 1
                    target = os.readlink(place)
                    if links > _MOST_LINKS:
                        return None
                    done = [] if target.startswith("/") else done[:-1]
                    todo += target.split("/")[::-1]
        return "/" + "/".join(done)

    def has(self, path: str) -> bool:
        """Whether there is anything at a path; a link that leads nowhere is."""
        folder, _, name = path.rstrip("/").rpartition("/")
        found = self.resolve(folder)
        return found is not None and self._find([*found.split("/"), name])[1] is not None

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none where there is no directory."""
        found = self.resolve(path)
        shown: dict[str, bool] = {}
        for tree in () if found is None else self.trees:
            info, hidden = self._look(tree, found.split("/") if found else [])
            if info is not None and not stat.S_ISDIR(info.st_mode):
                break
            if info is not None:
                place = f"{tree}{found}"
                for entry in os.scandir(place):
                    shown.setdefault(entry.name, kind_of(entry.stat(follow_symlinks=False)) != WHITEOUT)
                hidden = is_opaque(place)
            if hidden:
                break
        return sorted(name for name, there in shown.items() if there)

    def read(self, path: str, most: int = 16 << 20) -> bytes:
        """Return the beginning of a regular file; nothing where there is none.

        Args:
            path: the file.
            most: bytes.
        """
        found = self.resolve(path)
        place, info = self._find(found.split("/")) if found else ("", None)
        if info is None or not stat.S_ISREG(info.st_mode):
            return b""
        with suppress(OSError), open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read(most)
        return b""

    def _find(self, parts: list[str]) -> tuple[str, os.stat_result | None]:
        """Where the host has what is shown at a path without links on the way."""
        for tree in self.trees:
            info, hidden = self._look(tree, parts)
            if info is not None or hidden:
                return f"{tree}/{'/'.join(parts)}", info
        return "", None

    def _look(self, tree: Path, parts: list[str]) -> tuple[os.stat_result | None, bool]:
        try:
            return look(tree, tuple(part for part in parts if part))
        except OSError:  # a directory that is closed to its owner, a name that is too long
            return None, True
