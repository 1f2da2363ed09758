"""Keep descriptors 0 to 2 occupied."""

from __future__ import annotations

import os

_STREAMS = 3


def hold_streams() -> None:
    """Open /dev/null on closed standard streams.

    If descriptors 0 to 2 are closed, as in some daemons, the next open files get these numbers. Messages to stderr
    would then go to a socket, and child processes would replace the socket with their streams.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STREAMS:
        pass
    os.close(descriptor)
