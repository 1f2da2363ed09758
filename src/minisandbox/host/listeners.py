"""Listening sockets by which other processes of this user reach a sandbox or a process of it.

They lie in the private directory of the sandbox's owner. A path of a socket has at most 107 bytes (unix(7)), so
directories are named through descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from minisandbox.host.os_errors import ELSEWHERE, runtime_os_errors

_BACKLOG = 256
_PATIENCE = 60.0
"""Seconds to wait where too many others do already."""


def name_of(sandbox_id: str, process_id: str = "") -> str:
    """Return the name of the listener of a sandbox, or of a process of it."""
    return f"{sandbox_id}.{process_id}.door" if process_id else f"{sandbox_id}.door"


def make(directory: Path, name: str, elsewhere: str = ELSEWHERE) -> socket.socket:
    """Make a non-blocking listening socket.

    Args:
        directory: where it will lie.
        name: what it is called.
        elsewhere: how to have it made in another place.

    Raises:
        HostError: the listener cannot be created there.
    """
    with runtime_os_errors(f"make the socket {name}", directory, elsewhere), _opened(directory) as descriptor:
        return listen(descriptor, name)


def listen(directory: int, name: str) -> socket.socket:
    """Make a listener in an open directory.

    Args:
        directory: a descriptor of it.
        name: what the listener is called.

    Raises:
        OSError: the listener cannot be created there; FileNotFoundError if the directory was removed.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(f"{_path_of(directory)}/{name}")
        listener.listen(_BACKLOG)
    except BaseException:  # a Ctrl-C too: nothing half-made stays
        listener.close()
        raise
    return listener


def connect(directory: Path, name: str, *, wait: bool = True) -> socket.socket:
    """Connect to a listener.

    Args:
        directory: where it lies.
        name: what it is called.
        wait: whether to wait where too many others do already.

    Raises:
        BlockingIOError: too many others wait (connect(2): EAGAIN), and this one may not.
        TimeoutError: the listener has accepted no connection for a minute.
        OSError: the listener does not exist, or its owner has exited.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # not settimeout(): connect(2) on a unix socket that does not block never waits
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_PATIENCE))
        connection.setblocking(wait)
        with _opened(directory) as descriptor:
            connection.connect(f"{_path_of(descriptor)}/{name}")
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
    except BaseException as error:  # a Ctrl-C too: nothing half-made stays
        connection.close()
        if wait and isinstance(error, BlockingIOError):
            raise TimeoutError(errno.ETIMEDOUT, f"no connection was accepted for {_PATIENCE:.0f} s") from None
        raise
    return connection


def _timeval(seconds: float) -> bytes:
    """Pack a struct timeval; zero means no limit (socket(7))."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


def process_ids(directory: Path, sandbox_id: str) -> tuple[str, ...]:
    """Return the processes of a sandbox that have a live listener."""
    prefix, suffix = f"{sandbox_id}.", ".door"
    listening = _listening_names()
    return tuple(
        sorted(name[len(prefix) : -len(suffix)] for name in _files(directory, prefix, suffix) if name in listening)
    )


def _files(directory: Path, prefix: str, suffix: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [name for name in names if name.startswith(prefix) and name.endswith(suffix) and name != prefix + suffix[1:]]


def _listening_names() -> set[str]:
    """Return the last parts of the paths of all bound unix sockets (proc_net(5)): to connect would count as a visit."""
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as table:
        return {line.rstrip("\n").rpartition("/")[2] for line in table}


def remove(directory: Path, sandbox_id: str) -> None:
    """Remove the listeners of a sandbox and its processes, as far as that can be done."""
    for name in (name_of(sandbox_id), *_files(directory, f"{sandbox_id}.", ".door")):
        with contextlib.suppress(OSError):
            os.unlink(directory / name)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _path_of(descriptor: int) -> str:
    """Return a short path of an open directory, by this thread: the process's first thread may have exited."""
    return f"/proc/thread-self/fd/{descriptor}"
