"""A nonblocking connection to the handle of a process or shell."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque

from . import frames

_CHUNK = 1 << 18


class Link:
    """Frames in and out of a stream socket, without waiting.

    Args:
        connection: the socket; the link closes it.
        decoder: holds the received part of the next frame.
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
        """Whether frames wait for the reader: a producer of more should wait too."""
        return bool(self._unsent)

    @property
    def interest(self) -> int:
        """The events that poll(2) should look for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def put(self, header: frames.Header, payload: bytes = b"") -> None:
        """Send a frame, or as much of it as the socket takes now; the rest waits."""
        self._unsent.append(memoryview(frames.encode(header, payload)))
        self.flush()

    def flush(self) -> None:
        """Send waiting frames as far as the socket takes them. The end of the reader shows in :meth:`receive`."""
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
            ConnectionResetError: the peer closed and left something unread (af_unix.c, unix_release_sock).
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
        """Whether received frames wait, which poll(2) does not see."""
        return bool(self._pending)

    @property
    def hung_up(self) -> bool:
        """Whether the peer has closed its end. Frames that it sent before may still be received."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
