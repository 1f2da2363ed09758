"""Pass descriptors to other processes of ours."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Iterator, Sequence

_RAISING = threading.Lock()  # the limit is per process: a thread must not lower a limit that another thread has raised


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send a message that carries descriptors.

    For a user without privileges the kernel counts the descriptors that are not received yet, over all of the
    user's processes and sandboxes. It refuses senders whose limit of open files is smaller than that count
    (net/core/scm.c, too_many_unix_fds). A sandbox may leave as many under way as its own limit allows; the retry with
    our hard limit gets through.

    Raises:
        OSError: the peer is gone, or the kernel refused even so.
    """
    try:
        socket.send_fds(connection, [data], descriptors)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        with _hard_limit_of_open_files():
            socket.send_fds(connection, [data], descriptors)


@contextlib.contextmanager
def _hard_limit_of_open_files() -> Iterator[None]:
    """Raise the limit of open files to the hard limit in the body."""
    with _RAISING:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
