"""What a RUN mounts, put into the directory that takes its writes, and taken out again before that becomes a layer.

Caches, binds and tmpfs need no mounts so: they are there while the command runs, can be written, and leave nothing in
the layer. A cache is moved in from the store and back; a second RUN that wants it meanwhile begins with an empty one.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.images.dockerfile.trees import split
from minisandbox.images.tree import Parts, resolve
from minisandbox.store.blobs.below import Below
from minisandbox.store.blobs.unpack import OPAQUE
from minisandbox.store.disk.trees import remove_tree


@dataclass(slots=True)
class Placement:
    """The upper of one RUN.

    Attributes:
        tree: its directory, empty when the placing begins.
        image: what lies below it.
    """

    tree: Path
    image: Below
    _placed: list[Parts] = field(default_factory=list)

    def target(self, path: str) -> Parts:
        """Return where a target lies, without links.

        Raises:
            LinkError: it lies behind too many links.
        """
        return resolve(self.image, split(path))

    def put(self, path: Parts, source: Path) -> None:
        """Move a file or directory to a target; what the image has there is hidden meanwhile."""
        parent = self._folder(path[:-1])
        if source.is_dir():
            os.setxattr(source, OPAQUE, b"y")
        source.rename(parent / path[-1])
        self._placed.append(path)

    def expect(self, path: Parts) -> None:
        """Note a target that something else is mounted at, which leaves a mount point where the image has nothing."""
        self._placed.append(path)

    def take(self, path: Parts) -> Path | None:
        """Return where a target lies when the command ended; None if it was removed, or is behind a link now."""
        place = self.tree
        for part in path:
            place = place / part
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(place.lstat().st_mode):
                    continue
            return None
        return place

    def clean(self) -> None:
        """Remove the targets, and the directories that only they needed."""
        for path in self._placed:
            self._remove(path)
            for depth in range(len(path) - 1, 0, -1):
                folder = self.take(path[:depth])
                if folder is None or self.image.status(path[:depth]) is not None:
                    break
                with suppress(OSError):
                    folder.rmdir()

    def _remove(self, path: Parts) -> None:
        parent = self.take(path[:-1])
        if parent is None:
            return
        place = parent / path[-1]
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(place.lstat().st_mode):
                remove_tree(place)
            else:
                place.unlink()

    def _folder(self, path: Parts) -> Path:
        """Make the directories on the way as the image has them."""
        place = self.tree
        for depth, part in enumerate(path, 1):
            place = place / part
            if place.is_dir():
                continue
            info = self.image.status(path[:depth])
            place.mkdir(0o755)
            if info is not None:
                with suppress(PermissionError):  # an ordinary user has but one owner
                    os.chown(place, info.st_uid, info.st_gid)
                place.chmod(stat.S_IMODE(info.st_mode))
        return place


@contextmanager
def cache(store: Path, identity: str, owners: str, staging: Path, mode: int, owner: tuple[int, int]) -> Iterator[Path]:
    """A cache for the time of a RUN: the one that an earlier RUN left, or an empty one.

    Args:
        store: the directory of the caches.
        identity: which one.
        owners: whether files keep their owners; both kinds cannot use each other's.
        staging: where it is put meanwhile.
        mode: the permission bits of a new one.
        owner: the user and group of a new one.

    Yields:
        Where it lies; the caller moves it back if it moves it.
    """
    store.mkdir(mode=0o700, exist_ok=True)
    kept = store / hashlib.sha256(f"{owners} {identity}".encode("utf-8", "surrogateescape")).hexdigest()
    place = staging / f"cache-{kept.name[:16]}"
    try:
        kept.rename(place)
    except FileNotFoundError:
        place.mkdir()
        place.chmod(mode)
        with suppress(PermissionError):
            os.chown(place, *owner)
    try:
        yield place
    finally:
        with suppress(FileNotFoundError):
            if not kept.exists():  # else another RUN was sooner; the staging directory is removed with all in it
                place.rename(kept)
