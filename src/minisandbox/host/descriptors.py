"""Keep the descriptors of the standard streams open."""

from __future__ import annotations

import os

_STREAMS = 3


def hold_streams() -> None:
    """Open /dev/null on closed standard streams.

    If descriptors 0 to 2 are closed, as in some daemons, the next files or sockets get these numbers. Messages to
    stderr would then go to such a socket, and child processes would replace it with their own streams.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STREAMS:
        pass
    os.close(descriptor)
