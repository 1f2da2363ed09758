"""Descriptors for other processes of ours."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Iterator, Sequence

_RAISING = threading.Lock()  # a limit is the process's: two threads must not take each other's for the usual one


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send a message that carries descriptors.

    Of a user without privileges the kernel counts those that nobody has received yet, in all of the user's processes
    and sandboxes, and refuses whoever has so small a limit of open files (net/core/scm.c, too_many_unix_fds). A
    sandbox may leave as many under way as its own limit is; with the highest that we may have we still get through.

    Raises:
        OSError: the peer is gone, or the kernel refused even so.
    """
    try:
        socket.send_fds(connection, [data], descriptors)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        with _most_open_files():
            socket.send_fds(connection, [data], descriptors)


@contextlib.contextmanager
def _most_open_files() -> Iterator[None]:
    """As many open files as may be, for as long as it takes."""
    with _RAISING:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
