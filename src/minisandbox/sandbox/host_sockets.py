"""Sockets and FIFOs of the host below directories that sandboxes see: they connect through a read-only bind mount.

An overlay has inodes of its own for them, without a listener; a bind mount has the host's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator


def find(tops: Iterable[str]) -> tuple[str, ...]:
    """Return the sockets and FIFOs below directories, and the directories that this user cannot list.

    It takes most of a second for ten thousand directories.

    Args:
        tops: absolute paths; symbolic links are not followed.

    Returns:
        Their paths without the leading slash.
    """
    return tuple(path.lstrip("/") for top in tops for path in _below(top))


def _below(directory: str) -> Iterator[str]:
    waiting = [directory]
    while waiting:
        path = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                        yield entry.path
        except OSError:
            yield path
