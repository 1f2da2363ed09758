"""Waiting on a channel's connection from several threads: one of them listens, the others wait for its news."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Iterator
from typing import Generic

from minisandbox.sandbox.handles import give_up
from minisandbox.sandbox.lines import GRACE, Channel, Line


class SyncLine(Generic[Channel]):
    """A line that threads share. Every method but :meth:`close` is called under :attr:`lock`.

    Args:
        line: the line.

    Attributes:
        lock: guards the line and its channel.
    """

    def __init__(self, line: Line[Channel]) -> None:
        self.line = line
        self.channel = line.channel
        self.lock = threading.Lock()
        self._news = threading.Condition(self.lock)
        self._listening = False
        self._sending = False

    def say(self) -> None:
        """Send what the channel has to say, waiting while the connection takes none of it."""
        self.line.send()
        while self.line.unsent and not self.line.closed:
            self.wait(listen=False)

    def wait(self, deadline: float | None = None, *, listen: bool = True) -> bool:
        """Wait until something has happened, whichever thread saw to it.

        Args:
            deadline: when to give up, as time.monotonic() counts.
            listen: whether to take what has arrived; False where nobody would look at it.

        Returns:
            Whether the deadline has not passed. If it has, what had arrived before was taken all the same.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        self.line.check()
        left = None if deadline is None else deadline - time.monotonic()
        in_time = left is None or left > 0
        listen = listen and not self._listening
        send = self.line.unsent and not self._sending
        if listen or send:
            self._move(left, listen=listen, send=send)
        elif in_time:
            self._news.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
        self.line.check()
        return in_time

    def _move(self, left: float | None, *, listen: bool, send: bool) -> None:
        poll = select.poll()
        poll.register(self.line.connection, select.POLLIN * listen | select.POLLOUT * send)
        self._listening |= listen
        self._sending |= send
        try:
            with self._unlocked():
                # poll(2) takes an int of milliseconds; whoever waits longer comes back
                events = poll.poll(None if left is None else min(max(left * 1000, 0.0), 1e9))
            happened = sum(event for _, event in events)  # of one descriptor
            if send and happened & ~select.POLLIN:
                self.line.send()
            if listen and happened & ~select.POLLOUT:
                self.line.listen()
                if self.line.inconclusive:
                    self.line.conclude(self.line.reason())
        finally:
            self._listening &= not listen
            self._sending &= not send
            self._news.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def tell(self) -> None:
        """Let the other threads look again."""
        self._news.notify_all()

    def close(self) -> None:
        """Close the connection, also under those who wait on it; calling it again does nothing."""
        with self.lock:
            self.line.hang_up()
            while self._listening or self._sending:
                self._news.wait()
            self.line.close()
            self._news.notify_all()


def answered(line: Line[Channel]) -> SyncLine[Channel]:
    """Wait until the other end says that it runs.

    Args:
        line: a line that has begun.

    Returns:
        The line, for threads to share.

    Raises:
        MiniSandboxError: what keeps it from running.
        SandboxGone: nobody answers; the sandbox was stopped if it is ours.
    """
    shared, deadline = SyncLine(line), time.monotonic() + GRACE
    with shared.lock:
        shared.say()
        while not (line.channel.started or line.channel.done):
            if not shared.wait(deadline):
                raise give_up(line.core)
    line.channel.check()
    return shared
