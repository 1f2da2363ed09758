"""Send file descriptors to the launcher, the gateway and workers."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Iterator, Sequence

_RAISING = threading.Lock()  # the limit is per process, so one thread must not restore it while another needs it


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send a message that carries descriptors.

    For an unprivileged user, the kernel counts descriptors in flight over all the user's processes and sandboxes. It
    refuses a sender whose limit of open files is below that count (net/core/scm.c, too_many_unix_fds). A sandbox can
    keep as many descriptors in flight as its own limit allows, so the retry uses this process's hard limit.

    Raises:
        OSError: the peer is gone, or the kernel refused the retry too.
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
    """Raise the limit of open files to the hard limit while the body runs."""
    with _RAISING:
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
