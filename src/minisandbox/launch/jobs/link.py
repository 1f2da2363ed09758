"""A non-blocking connection between a worker and the handle of its process or shell."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque

from . import frames

_CHUNK = 1 << 18


class Link:
    """Sends and receives frames on a stream socket without blocking.

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
    def full(self) -> bool:
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
                sent = self._connection.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._broken = True
                break
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
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
        received, self._pending = self._pending, []
        with contextlib.suppress(BlockingIOError):
            data = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
            if not data and not received:
                raise EOFError
            received += self._decoder.feed(data)
        return received

    @property
    def waiting(self) -> bool:
        """Whether received frames wait in the link, where poll(2) does not see them."""
        return bool(self._pending)

    @property
    def hung_up(self) -> bool:
        """Whether the peer has closed its end. Frames that it sent before can still be received."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
