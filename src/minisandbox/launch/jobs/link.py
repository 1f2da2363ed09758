"""A connection to whoever holds a process or a shell: it never waits, neither for its reader nor for its writer."""

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
        decoder: what has been received of the next frame.
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
        """Its descriptor."""
        return self._connection.fileno()

    @property
    def full(self) -> bool:
        """Whether something waits for the reader: who makes more should wait too."""
        return bool(self._unsent)

    @property
    def interest(self) -> int:
        """What poll(2) should look for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def put(self, header: frames.Header, payload: bytes = b"") -> None:
        """Send a frame, or as much of it as can be taken now."""
        self._unsent.append(memoryview(frames.encode(header, payload)))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it is taken; a reader that is gone shows when we listen."""
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
        """The frames that have arrived.

        Raises:
            EOFError: the peer closed.
            ConnectionResetError: the peer closed and left something unread (af_unix.c, unix_release_sock).
            FrameError: it sends something else than frames.
        """
        found, self._pending = self._pending, []
        with contextlib.suppress(BlockingIOError):
            data = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
            if not data and not found:
                raise EOFError
            found += self._decoder.feed(data)
        return found

    @property
    def waiting(self) -> bool:
        """Whether frames wait that poll(2) does not know of."""
        return bool(self._pending)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
