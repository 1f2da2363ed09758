"""Carry a call through on a blocking socket."""

from __future__ import annotations

import contextlib
import socket
import time

from minisandbox.sandbox.wire import Call


def converse(call: Call, connection: socket.socket, give_up: float | None = None) -> None:
    """Send what a call has to say and feed it the answer, until it is done or the peer has hung up.

    Args:
        call: the call.
        connection: a job's socket; its timeout bounds each wait.
        give_up: when all of it must be done, as time.monotonic() counts; None where each wait is bounded alone.

    Raises:
        TimeoutError: the socket's timeout passed, or it was time to give up.
        SandboxGone: the peer's answer makes no sense.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its answer says why
        for piece in call.outgoing():
            _limit(connection, give_up)
            connection.sendall(piece)
    while not call.done:
        _limit(connection, give_up)
        if not (data := receive(connection)):
            break
        call.feed(data)


def _limit(connection: socket.socket, give_up: float | None) -> None:
    """Have the next wait end when it is time to give up."""
    if give_up is None:
        return
    left = give_up - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def receive(connection: socket.socket) -> bytes:
    """Some bytes, or none at the end of the stream."""
    for _ in range(2):  # reported once where the peer closed with our bytes unread; its answer still waits
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(1 << 18)
    return b""
