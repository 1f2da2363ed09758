"""Carry a call through on a blocking socket."""

from __future__ import annotations

import contextlib
import socket

from minisandbox.sandbox.wire import Call


def converse(call: Call, connection: socket.socket) -> None:
    """Send what a call has to say and feed it the answer, until it is done or the peer has hung up.

    Args:
        call: the call.
        connection: a job's socket; its timeout bounds each wait.

    Raises:
        TimeoutError: the socket's timeout passed.
        SandboxGone: the peer's answer makes no sense.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its answer says why
        for piece in call.outgoing():
            connection.sendall(piece)
    while not call.done and (data := receive(connection)):
        call.feed(data)


def receive(connection: socket.socket) -> bytes:
    """Some bytes, or none at the end of the stream."""
    for _ in range(2):  # reported once where the peer closed with our bytes unread; its answer still waits
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(1 << 18)
    return b""
