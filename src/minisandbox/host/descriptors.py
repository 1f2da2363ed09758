"""The numbers of standard streams."""

from __future__ import annotations

import os

_STREAMS = 3


def hold_streams() -> None:
    """Have nothing of ours get the number of a standard stream that is closed: /dev/null gets it.

    A process that has closed descriptors 0 to 2, as daemons do, would get them for the next file: a socket of ours, to
    which a message for stderr would go, and which would make way for the streams of a program that we start.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STREAMS:
        pass
    os.close(descriptor)
