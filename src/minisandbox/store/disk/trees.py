"""Remove and measure directory trees with untrusted content; never follow links, never recurse."""

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
        bytes: bytes of the allocated blocks; a hard-linked file counts once.
        files: number of names in the tree that are not directories.
    """

    bytes: int
    files: int


def remove_tree(path: Path) -> None:
    """Remove a directory tree, regardless of its modes and depth, without following links.

    The owner first gets permissions on directories that deny them, for example overlayfs's ``work`` with mode 000.

    Args:
        path: the directory; a missing directory is ignored.

    Raises:
        OSError: a system call failed, for instance because of an immutable file or a mount in the tree.
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
        The size, including the blocks of directories. Files that are created or removed meanwhile, and unreadable
        directories, may be missing.
    """
    blocks = files = 0
    counted_inodes: set[int] = set()
    walker = trees.DirWalker(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with contextlib.closing(walker):
        for status in trees.walk_statuses(walker):
            if not stat.S_ISDIR(status.st_mode):
                files += 1
                if status.st_nlink > 1 and status.st_ino in counted_inodes:
                    continue
                counted_inodes.add(status.st_ino)
            blocks += status.st_blocks
    return TreeSize(blocks * 512, files)  # stat(2): st_blocks counts 512-byte units on every file system
