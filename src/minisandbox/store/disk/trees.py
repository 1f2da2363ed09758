"""Directory trees whose content is not trusted: removed and measured without following a link or recursing."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.launch.jobs.trees import DirWalker

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class TreeSize:
    """What a tree takes on disk.

    Attributes:
        bytes: blocks taken, in bytes; a file with several names in the tree counts once.
        files: names in the tree that are not directories.
    """

    bytes: int
    files: int


def remove_tree(path: Path) -> None:
    """Remove a directory tree, whatever its modes, depth and links.

    Subdirectories are moved up to the root before they are emptied, so that depth costs neither stack nor open files
    nor PATH_MAX. Directories that refuse (such as overlayfs's ``work``, mode 000) are given their owner's rights first.

    Args:
        path: the directory; nothing happens if it does not exist.

    Raises:
        OSError: the kernel refused, for instance an immutable file or a mount in the tree.
    """
    with contextlib.ExitStack() as opened:
        try:
            parent = os.open(path.parent, _DIRECTORY & ~os.O_NOFOLLOW)
            opened.callback(os.close, parent)
            root = _open_directory(path.name, parent)
        except FileNotFoundError:
            return
        opened.callback(os.close, root)
        _empty(root)
        os.rmdir(path.name, dir_fd=parent)


def _empty(root: int) -> None:
    prefix, count = f".gone-{secrets.token_hex(8)}-", 0
    waiting = _unlink_files(root)
    while waiting:
        name = waiting.pop()
        fd = _open_directory(name, root)
        try:
            for child in _unlink_files(fd):
                moved, count = f"{prefix}{count}", count + 1
                _move_up(child, fd, moved, root)
                waiting.append(moved)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=root)


def _unlink_files(fd: int) -> list[str]:
    """Remove everything in a directory that is not one; return the names of its subdirectories."""
    directories: list[str] = []
    with os.scandir(fd) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            directories.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=fd)
    return directories


def _move_up(name: str, source: int, moved: str, root: int) -> None:
    try:
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=root)
    except PermissionError:  # renaming a directory changes its "..", which takes write permission on itself
        os.close(_open_directory(name, source))
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=root)


def _open_directory(name: str, parent: int) -> int:
    """Open a directory for emptying; give its owner all rights where they are missing."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        _grant(name, parent)
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    if os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        try:
            os.fchmod(fd, stat.S_IRWXU)
        except BaseException:  # the descriptor must not leak, whatever ended it
            os.close(fd)
            raise
    return fd


def _grant(name: str, parent: int) -> None:
    """Set mode 0700 on a directory that cannot be opened: by an O_PATH descriptor, so that no link is followed."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/thread-self/fd/{fd}", stat.S_IRWXU)
    finally:
        os.close(fd)


def measure_tree(path: Path) -> TreeSize:
    """Measure what a tree takes on disk.

    Args:
        path: the directory.

    Returns:
        Its size; directories' own blocks included. What is made or removed meanwhile, or closed to us, may be missing.
    """
    taken = files = 0
    seen: set[int] = set()
    for info in _walk_stats(path):
        if not stat.S_ISDIR(info.st_mode):
            files += 1
            if info.st_nlink > 1 and info.st_ino in seen:
                continue
            seen.add(info.st_ino)
        taken += info.st_blocks * 512  # stat(2): st_blocks counts 512-byte units on every file system
    return TreeSize(taken, files)


def _walk_stats(path: Path) -> Iterator[os.stat_result]:
    """What lstat(2) says of everything below a directory; depth costs neither stack nor open files nor PATH_MAX."""
    walker = DirWalker(os.open(path, _DIRECTORY & ~os.O_NOFOLLOW))
    try:
        waiting = [_look(walker.fd)]  # for each directory on the way down, what is still to be looked at
        while waiting:
            info, name = next(waiting[-1], (None, ""))
            if info is None:
                waiting.pop()
                if waiting:
                    walker.up()
                continue
            yield info
            if stat.S_ISDIR(info.st_mode):
                with contextlib.suppress(OSError):
                    walker.down(name)
                    waiting.append(_look(walker.fd))
    finally:
        walker.close()


def _look(fd: int) -> Iterator[tuple[os.stat_result, str]]:
    """What lstat(2) says of everything in a directory, and the names."""
    found: list[tuple[os.stat_result, str]] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.stat(follow_symlinks=False), entry.name))
    return iter(found)
