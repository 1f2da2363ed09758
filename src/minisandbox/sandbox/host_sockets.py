"""Find sockets and FIFOs of the host below bind-mounted directories, so that sandboxes can be kept from using them.

Even a read-only bind mount shows the host's inodes, so code inside could connect to their listeners. An overlay creates
its own inodes, which have no listener.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator


def find(tops: Iterable[str]) -> tuple[str, ...]:
    """Return the sockets and FIFOs below directories, and the directories that this user cannot list.

    The search takes almost a second for ten thousand directories.

    Args:
        tops: absolute paths of directories; symbolic links are not followed.

    Returns:
        Paths without the leading slash.
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
