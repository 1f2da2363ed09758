"""The stateful shell of the asynchronous sandbox."""

from __future__ import annotations

import asyncio
import time
import types
from pathlib import PurePosixPath
from typing import Self

from minisandbox.sandbox.aio_drive import in_thread, open_job
from minisandbox.sandbox.aio_lines import AsyncLine, answered
from minisandbox.sandbox.handles import SandboxCore, give_up
from minisandbox.sandbox.lines import Line, Queue
from minisandbox.sandbox.processes import ShellChannel
from minisandbox.types import ShellResult


class AsyncShell:
    """As :class:`.Shell`, for the tasks of one event loop.

    Args:
        line: the connection to whoever supervises bash, which has answered.
    """

    def __init__(self, line: AsyncLine[ShellChannel]) -> None:
        self._line = line
        self._channel = line.channel
        self._queue = Queue()

    @classmethod
    async def _opened(cls, core: SandboxCore, channel: ShellChannel) -> Self:
        line = Line(core, channel, await open_job(core), "shell")
        try:
            line.begin()
            return cls(await answered(line))
        except BaseException:  # a cancellation too: closing ends bash
            line.close()
            raise

    @property
    def cwd(self) -> PurePosixPath:
        """As :attr:`.Shell.cwd`."""
        return self._channel.cwd

    async def run(self, script: str, *, timeout: float | None = None) -> ShellResult:
        """As :meth:`.Shell.run`. A cancellation interrupts the script as a timeout does; the shell goes on."""
        self._line.line.check_open()
        if self._channel.done:
            await self._begin_again()
        number = self._channel.run(script, timeout=timeout)
        deadline = self._queue.join(timeout)
        try:
            await self._line.say()
            return await self._result(number, None if deadline is None else deadline - time.monotonic())
        except BaseException:  # a cancellation too: nobody will take the result
            self._channel.interrupt(number)
            self._channel.forget(number)
            self._line.line.send()
            raise
        finally:
            self._queue.leave()

    async def _begin_again(self) -> None:
        connection = await open_job(self._line.line.core)
        if self._channel.done and not self._line.line.closed:
            self._line.begin_again(connection)
        else:  # another task was quicker
            connection.close()
        self._line.line.check_open()

    async def _result(self, number: int, patience: float | None) -> ShellResult:
        try:
            async with asyncio.timeout(patience) as limit:
                while (result := self._channel.take(number)) is None:
                    self._channel.check()
                    await self._line.wait()
                return result
        except TimeoutError:
            if not limit.expired():
                raise
            raise await in_thread(give_up, self._line.line.core) from None

    async def close(self) -> None:
        """As :meth:`.Shell.close`."""
        self._line.close()

    async def __aenter__(self) -> Self:
        """As :meth:`.Shell.__enter__`."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """As :meth:`.Shell.__exit__`."""
        await self.close()
