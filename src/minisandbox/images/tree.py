"""The files of an image, read by the host: layers merged, links resolved inside the image, never followed out of it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass

from minisandbox.store.blobs.below import Below

_MOST_LINKS = 40  # as the kernel: path_resolution(7)


@dataclass(frozen=True, slots=True)
class ImageTree:
    """Layers that nobody changes meanwhile. Paths are absolute paths of the image; what is closed to us is not there.

    Attributes:
        layers: their trees.
    """

    layers: Below

    def resolve(self, path: str) -> tuple[str, ...] | None:
        """Return the parts of a path without links; None where there is nothing, or nothing that can be reached."""
        done: list[str] = []
        todo = path.split("/")[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
            elif part not in ("", "."):
                done.append(part)
                found = self._find(done)
                if found is None:
                    return None
                if stat.S_ISLNK(found[1].st_mode):
                    links += 1
                    target = os.readlink(found[0])
                    if links > _MOST_LINKS:
                        return None
                    done = [] if target.startswith("/") else done[:-1]
                    todo += target.split("/")[::-1]
        return tuple(done)

    def has(self, path: str) -> bool:
        """Whether there is anything at a path; a link that leads nowhere is."""
        folder, _, name = path.rstrip("/").rpartition("/")
        found = self.resolve(folder)
        return found is not None and self._find([*found, name]) is not None

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none where there is no directory."""
        found = self.resolve(path)
        with suppress(OSError):
            return [] if found is None else self.layers.names(found)
        return []

    def read(self, path: str, most: int = 16 << 20) -> bytes:
        """Return the beginning of a regular file; nothing for anything else.

        Args:
            path: the file.
            most: bytes.
        """
        parts = self.resolve(path)
        found = None if parts is None else self._find(parts)
        if found is not None and stat.S_ISREG(found[1].st_mode):
            with suppress(OSError), open(os.open(found[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                return file.read(most)
        return b""

    def _find(self, parts: list[str] | tuple[str, ...]) -> tuple[str, os.stat_result] | None:
        with suppress(OSError):
            return self.layers.find(tuple(parts))
        return None
