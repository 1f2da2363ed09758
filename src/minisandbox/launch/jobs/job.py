"""The worker's end of connections: a job (one request and its answers), and a non-blocking link to a handle."""

from __future__ import annotations

import array
import contextlib
import select
import socket
from collections import deque

from minisandbox.launch.kernel.cgroups import LimitCounters

from . import frames

_FIRST_PIECE = 1 << 16
_PIECE = 1 << 20
_CHUNK = 1 << 18


class WorkerJob:
    """The worker's end of one request's socket.

    Args:
        connection: the socket on which the request arrives.
        counters: counters of the limits that the job hits.

    Attributes:
        request: the request's header.
        payload: the request's bytes.
        listener: descriptor of a listening socket that came with the request's first byte, or -1.

    Raises:
        EOFError: the controller hung up.
    """

    def __init__(self, connection: socket.socket, counters: LimitCounters) -> None:
        self.connection = connection
        self.counters = counters
        self.listener = -1
        self._decoder = frames.Decoder()
        self._pending: list[tuple[frames.Header, bytes]] = []
        self._take(self._receive_first())
        self.request, self.payload = self.receive()

    def _receive_first(self) -> bytes:
        flags = socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self.connection.recvmsg(_FIRST_PIECE, socket.CMSG_SPACE(4), flags)
        for level, kind, packed_descriptor in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.listener = array.array("i", packed_descriptor[:4])[0]
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


class Link:
    """Sends and receives frames on a stream socket without blocking, between a worker and the handle of its process.

    Args:
        connection: the socket; the link closes it.
        decoder: decoder that holds the received part of the next frame.
        pending: frames that were received already.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: frames.Decoder | None = None,
        pending: list[tuple[frames.Header, bytes]] | None = None,
    ) -> None:
        self._connection = connection
        self._decoder = decoder or frames.Decoder()
        self._pending = pending or []
        self._unsent: deque[memoryview] = deque()
        self._broken = False

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether unsent frames wait for the peer to read; a producer should pause then."""
        return bool(self._unsent)

    @property
    def interest(self) -> int:
        """The events that poll(2) should look for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def put(self, header: frames.Header, payload: bytes = b"") -> None:
        """Queue a frame, and send as much as the socket accepts now."""
        self._unsent.append(memoryview(frames.encode(header, payload)))
        self.flush()

    def flush(self) -> None:
        """Send queued frames as far as the socket accepts them; :meth:`receive` reports a peer that has hung up."""
        while self._unsent and not self._broken:
            try:
                sent_size = self._connection.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._broken = True
                break
            if sent_size < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent_size:]
            else:
                self._unsent.popleft()
        if self._broken:
            self._unsent.clear()

    def receive(self) -> list[tuple[frames.Header, bytes]]:
        """Return the frames that have arrived.

        Raises:
            EOFError: the peer closed.
            ConnectionResetError: the peer closed with unread data in its socket (af_unix.c, unix_release_sock).
            FrameError: the peer sent bytes that are not frames.
        """
        ready_frames, self._pending = self._pending, []
        with contextlib.suppress(BlockingIOError):
            chunk = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
            if not chunk and not ready_frames:
                raise EOFError
            ready_frames += self._decoder.feed(chunk)
        return ready_frames

    @property
    def has_pending(self) -> bool:
        """Whether received frames wait in the link, where poll(2) does not see them."""
        return bool(self._pending)

    @property
    def has_hung_up(self) -> bool:
        """Whether the peer has closed its end. Frames that it sent before can still be received."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
