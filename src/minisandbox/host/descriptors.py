"""The numbers of standard streams."""

from __future__ import annotations

import os

_STREAMS = 3


def hold_streams() -> None:
    """Have nothing of ours get the number of a standard stream that is closed: /dev/null gets it.

    Whoever has closed descriptors 0 to 2, as daemons do, would get them for what is opened next: a socket of ours, into
    which a message for stderr would go, and which would make way for the streams of a program that we start.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STREAMS:
        pass
    os.close(descriptor)
