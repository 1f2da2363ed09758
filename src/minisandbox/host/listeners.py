"""Create and connect to the listening sockets of sandboxes and of their processes.

Other processes of this user attach to a sandbox through these sockets. They lie in the private directory of the
sandbox's owner. The path of a unix socket has at most 107 bytes (unix(7)), so the path names the directory by its
descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from pathlib import Path

from minisandbox.host.os_errors import OTHER_RUNTIME, runtime_os_errors
from minisandbox.launch.kernel import syscalls as sc

_BACKLOG = 256
_PATIENCE = 60.0
"""Seconds to wait while the listener's queue is full."""


def name_of(sandbox_id: str, process_id: str = "") -> str:
    """Return the file name of the listener of a sandbox, or of a process in it."""
    return f"{sandbox_id}.{process_id}.door" if process_id else f"{sandbox_id}.door"


def make(directory: Path, name: str, other_directory: str = OTHER_RUNTIME) -> socket.socket:
    """Create a non-blocking listening socket.

    Args:
        directory: directory of the socket.
        name: file name of the socket.
        other_directory: hint for an error: how to choose another directory.

    Raises:
        HostError: the listener cannot be created in the directory.
    """
    with runtime_os_errors(f"make the socket {name}", directory, other_directory), _opened(directory) as descriptor:
        return listen(descriptor, name)


def listen(directory: int, name: str) -> socket.socket:
    """Create a non-blocking listening socket in an open directory.

    Args:
        directory: descriptor of the directory.
        name: file name of the socket.

    Raises:
        OSError: the listener cannot be created; FileNotFoundError if the directory was removed.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(f"{_path_of(directory)}/{name}")
        listener.listen(_BACKLOG)
    except BaseException:  # even on Ctrl-C, clean up
        listener.close()
        raise
    return listener


def connect(directory: Path, name: str, *, wait: bool = True) -> socket.socket:
    """Connect to a listener.

    Args:
        directory: directory of the socket.
        name: file name of the socket.
        wait: whether to wait while the listener's queue is full.

    Raises:
        BlockingIOError: the listener's queue is full (connect(2): EAGAIN), and ``wait`` is False.
        TimeoutError: the listener has accepted no connection for a minute.
        OSError: the listener does not exist, or its owner has exited.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # set the timeout in the kernel: settimeout() makes the socket non-blocking, and connect(2) would fail at once
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_PATIENCE))
        connection.setblocking(wait)
        with _opened(directory) as descriptor:
            connection.connect(f"{_path_of(descriptor)}/{name}")
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
    except BaseException as error:  # even on Ctrl-C, clean up
        connection.close()
        if wait and isinstance(error, BlockingIOError):
            raise TimeoutError(errno.ETIMEDOUT, f"no connection was accepted for {_PATIENCE:.0f} s") from None
        raise
    return connection


def _timeval(seconds: float) -> bytes:
    """Pack a struct timeval; zero means no limit (socket(7))."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


def process_ids(directory: Path, sandbox_id: str) -> tuple[str, ...]:
    """Return the ids of the processes of a sandbox that have a live listener."""
    prefix, suffix = f"{sandbox_id}.", ".door"
    live_names = _listening_names()
    return tuple(
        sorted(name[len(prefix) : -len(suffix)] for name in _files(directory, prefix, suffix) if name in live_names)
    )


def _files(directory: Path, prefix: str, suffix: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [name for name in names if name.startswith(prefix) and name.endswith(suffix) and name != prefix + suffix[1:]]


def _listening_names() -> set[str]:
    """Return the file names of all bound unix sockets (proc_net(5)). A test connection would disturb the listener."""
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as table:
        return {line.rstrip("\n").rpartition("/")[2] for line in table}


def remove(directory: Path, sandbox_id: str) -> None:
    """Remove the listeners of a sandbox and its processes, ignoring errors."""
    for name in (name_of(sandbox_id), *_files(directory, f"{sandbox_id}.", ".door")):
        with contextlib.suppress(OSError):
            os.unlink(directory / name)


def _opened(directory: Path) -> contextlib.AbstractContextManager[int]:
    return sc.closing(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))


def _path_of(descriptor: int) -> str:
    """Return a short path of an open directory. It avoids /proc/self, because the main thread may have exited."""
    return f"/proc/thread-self/fd/{descriptor}"
