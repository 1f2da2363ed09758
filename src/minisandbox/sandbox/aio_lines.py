"""Waiting on a channel's connection from several tasks of an event loop.

The loop watches the connection while somebody waits, and not otherwise: what nobody wants to hear stays in the socket,
and makes its sender wait. No task reads for the others, so that the cancellation of one takes nothing from them, and
no byte is lost between a socket and a cancelled task.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Generic

from minisandbox.sandbox.aio_drive import in_thread
from minisandbox.sandbox.handles import give_up
from minisandbox.sandbox.lines import GRACE, Channel, Line


class AsyncLine(Generic[Channel]):
    """A line that tasks of one event loop share.

    Args:
        line: the line.
    """

    def __init__(self, line: Line[Channel]) -> None:
        self.line = line
        self.channel = line.channel
        self._waiting: dict[asyncio.Future[None], bool] = {}

    async def say(self) -> None:
        """Send what the channel has to say, waiting while the connection takes none of it."""
        self.line.send()
        while self.line.unsent and not self.line.closed:
            await self.wait(listen=False)

    async def wait(self, *, listen: bool = True) -> None:
        """Wait until something has happened.

        Args:
            listen: whether to take what has arrived; False where nobody would look at it.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        self.line.check()
        if self.line.inconclusive:
            self.line.conclude(await in_thread(self.line.reason))
        else:
            await self._news(listen=listen)
        self.line.check()

    async def _news(self, *, listen: bool) -> None:
        loop = asyncio.get_running_loop()
        news = loop.create_future()
        self._waiting[news] = listen
        self._watch(loop)
        try:
            await news
        finally:
            del self._waiting[news]
            self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the loop look for what those who wait want."""
        if self.line.closed:  # close() has told the loop
            return
        if any(self._waiting.values()) and not self.line.over:
            loop.add_reader(self.line.connection, self._listen)
        else:
            loop.remove_reader(self.line.connection)
        if self._waiting and self.line.unsent:
            loop.add_writer(self.line.connection, self._send)
        else:
            loop.remove_writer(self.line.connection)

    def _listen(self) -> None:
        self.line.listen()
        self.tell()

    def _send(self) -> None:
        self.line.send()
        self.tell()

    def look(self) -> None:
        """Take what has arrived, without waiting."""
        if not self.line.closed and not self.line.over:
            self._listen()

    def tell(self) -> None:
        """Let all that wait look again."""
        for news in self._waiting:
            if not news.done():
                news.set_result(None)

    def close(self) -> None:
        """Close the connection, also under those who wait on it; calling it again does nothing."""
        if not self.line.closed:
            self._watch_no_more()
            self.line.close()
            self.tell()

    def begin_again(self, connection: socket.socket) -> None:
        """Go on with the same channel on another connection."""
        self._watch_no_more()
        self.line.begin_again(connection)
        self.tell()

    def _watch_no_more(self) -> None:
        with contextlib.suppress(RuntimeError):  # no loop runs: then none watches
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.line.connection)
            loop.remove_writer(self.line.connection)


async def answered(line: Line[Channel]) -> AsyncLine[Channel]:
    """Wait until the other end says that it runs.

    Args:
        line: a line that has begun.

    Returns:
        The line, for tasks to share.

    Raises:
        MiniSandboxError: what keeps it from running.
        SandboxGone: nobody answers; the sandbox was stopped if it is ours.
    """
    shared = AsyncLine(line)
    try:
        async with asyncio.timeout(GRACE) as limit:
            await shared.say()
            while not (line.channel.started or line.channel.done):
                await shared.wait()
    except TimeoutError:
        if not limit.expired():
            raise
        raise await in_thread(give_up, line.core) from None
    line.channel.check()
    return shared
