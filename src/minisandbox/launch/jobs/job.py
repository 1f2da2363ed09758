"""A job: one request and the socket on which a worker answers it."""

from __future__ import annotations

import array
import contextlib
import socket

from minisandbox.launch.kernel.cgroups import LimitCounters

from . import frames
from .link import Link

_FIRST_PIECE = 1 << 16
_PIECE = 1 << 20


class WorkerJob:
    """The worker's end of one request's socket.

    Args:
        connection: the socket on which the request arrives.
        counters: counters of the limits that the job hits.

    Attributes:
        request: the request's header.
        payload: the request's bytes.
        door: descriptor of a listening socket that came with the request's first byte, or -1.

    Raises:
        EOFError: the controller hung up.
    """

    def __init__(self, connection: socket.socket, counters: LimitCounters) -> None:
        self.connection = connection
        self.counters = counters
        self.door = -1
        self._decoder = frames.Decoder()
        self._pending: list[tuple[frames.Header, bytes]] = []
        self._take(self._receive_first())
        self.request, self.payload = self.receive()

    def _receive_first(self) -> bytes:
        flags = socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self.connection.recvmsg(_FIRST_PIECE, socket.CMSG_SPACE(4), flags)
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.door = array.array("i", raw[:4])[0]
        return data

    def receive(self) -> tuple[frames.Header, bytes]:
        """Wait for the next frame from the controller.

        Raises:
            EOFError: the controller hung up.
        """
        while not self._pending:
            self._take(self.connection.recv(_PIECE))
        return self._pending.pop(0)

    def _take(self, data: bytes) -> None:
        if not data:
            raise EOFError
        self._pending.extend(self._decoder.feed(data))

    def link(self) -> Link:
        """Return a non-blocking link on the same connection; afterwards use the link instead of the job."""
        return Link(self.connection, self._decoder, self._pending)

    def send(self, header: frames.Header, payload: bytes = b"") -> None:
        """Send a frame; it is dropped if the controller hung up."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.sendall(frames.encode(header, payload))

    def fail(self, error: OSError, operation: str, path: object = "") -> None:
        """Answer the request with an error."""
        self.send(
            {"event": "error", "errno": error.errno, "message": error.strerror, "operation": operation, "path": path}
        )
