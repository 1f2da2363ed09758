"""Make sure that the standard streams are open."""

from __future__ import annotations

import os

_STREAMS = 3


def hold_streams() -> None:
    """Open /dev/null on closed standard streams.

    If descriptors 0 to 2 are closed, as in daemons, the next files get these numbers: messages for stderr would go to a
    socket of ours, and programs that we start would replace it by their streams.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STREAMS:
        pass
    os.close(descriptor)
