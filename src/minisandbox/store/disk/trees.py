"""Remove and measure directory trees with untrusted content, without following links or recursing."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from minisandbox.launch.jobs import trees


@dataclass(frozen=True, slots=True)
class TreeSize:
    """Disk use of a tree.

    Attributes:
        bytes: blocks taken, in bytes; a file with several names in the tree counts once.
        files: names in the tree that are not directories.
    """

    bytes: int
    files: int


def remove_tree(path: Path) -> None:
    """Remove a directory tree, whatever its modes, depth and links.

    Directories that refuse (such as overlayfs's ``work``, mode 000) are given their owner's rights first.

    Args:
        path: the directory; nothing happens if it does not exist.

    Raises:
        OSError: the kernel refused, for instance an immutable file or a mount in the tree.
    """
    with contextlib.suppress(FileNotFoundError):
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            trees.remove(parent, path.name, force=True)
        finally:
            os.close(parent)


def measure_tree(path: Path) -> TreeSize:
    """Measure the disk use of a tree.

    Args:
        path: the directory.

    Returns:
        Its size; directories' own blocks included. What is made or removed meanwhile, or closed to us, may be missing.
    """
    blocks = files = 0
    seen: set[int] = set()
    walker = trees.DirWalker(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with contextlib.closing(walker):
        for status in trees.walk_statuses(walker):
            if not stat.S_ISDIR(status.st_mode):
                files += 1
                if status.st_nlink > 1 and status.st_ino in seen:
                    continue
                seen.add(status.st_ino)
            blocks += status.st_blocks
    return TreeSize(blocks * 512, files)  # stat(2): st_blocks counts 512-byte units on every file system
