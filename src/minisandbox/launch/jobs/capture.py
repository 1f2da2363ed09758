"""Keep the head and the tail of a stream of unknown length, and count what lies between."""

from __future__ import annotations

from collections import deque


class Capture:
    """Keeps at most ``limit`` bytes: the first half of it and the last.

    Args:
        limit: bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._head_room = limit // 2
        self._tail_room = limit - limit // 2
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.dropped = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._head_room:
            self._head.append(data[: self._head_room])
            taken = len(self._head[-1])
            self._head_room -= taken
            data = data[taken:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size > self._tail_room:
            self._shorten_tail(self._tail_size - self._tail_room)

    def _shorten_tail(self, excess: int) -> None:
        first = self._tail.popleft()
        cut = min(excess, len(first))
        if cut < len(first):
            self._tail.appendleft(first[cut:])
        self._tail_size -= cut
        self.dropped += cut

    def result(self) -> bytes:
        """What was kept; where bytes are missing, a line between head and tail says how many."""
        head, tail = b"".join(self._head), b"".join(self._tail)
        if not self.dropped:
            return head + tail
        return head + b"\n[... %d bytes dropped ...]\n" % self.dropped + tail
