"""Read files of a store safely: never follow links, block on a FIFO, or read more than a size limit.

A store can belong to another user, who may replace a file by a link, a FIFO or an endless file. The same checks apply
to the user's own store, because they also detect damage.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from minisandbox.launch.kernel import syscalls
from minisandbox.reading import FLAGS, open_regular, read_limited


def open_below(root: Path, name: str) -> IO[bytes]:
    """Open a regular file of a store for reading.

    Args:
        root: the store's directory, whose own path may contain links.
        name: path of the file, relative to ``root``; it may not contain links or lead out of ``root``.

    Raises:
        StoreError: the name is not a regular file, or its path contains a link.
        OSError: the file cannot be opened; FileNotFoundError if it is missing.
    """
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_regular(f"{root}/{name}", lambda: syscalls.openat2(root_fd, name, FLAGS, syscalls.RESOLVE_INSIDE))
    finally:
        os.close(root_fd)


def read_below(root: Path, name: str, limit: int) -> bytes:
    """Read a regular file of a store.

    Args:
        root: the store's directory.
        name: path of the file, relative to ``root``.
        limit: maximum size in bytes.

    Raises:
        StoreError: the name is not a regular file, its path contains a link, or the file is larger than ``limit``.
        OSError: the file cannot be read; FileNotFoundError if it is missing.
    """
    with open_below(root, name) as file:
        return read_limited(file, f"{root}/{name}", limit)
