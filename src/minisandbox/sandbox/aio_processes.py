"""Streaming processes of the asynchronous sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Self

from minisandbox.errors import InvalidValue, NotFound, SandboxGone, WaitTimeout
from minisandbox.sandbox.aio_drive import in_thread, open_job
from minisandbox.sandbox.aio_lines import AsyncLine, answered
from minisandbox.sandbox.arguments import check_wait
from minisandbox.sandbox.handles import SandboxCore
from minisandbox.sandbox.lines import KILL_PATIENCE, LOOK_AGAIN, Line, as_bytes, has_room, still_runs
from minisandbox.sandbox.processes import ProcessChannel
from minisandbox.types import ExecResult, Output, Terminal


class AsyncProcess:
    """As :class:`.Process`, for the tasks of one event loop. Leaving a wait early loses nothing of its output.

    Args:
        line: the connection to whoever supervises the process, which has answered.
        owned: whether the process ends with this handle.
    """

    def __init__(self, line: AsyncLine[ProcessChannel], *, owned: bool) -> None:
        self._line = line
        self._channel = line.channel
        self._owned = owned
        self._deadline = None if self._channel.left is None else time.monotonic() + self._channel.left
        self._readers: weakref.WeakSet[_Events] = weakref.WeakSet()

    @classmethod
    async def _started(cls, core: SandboxCore, channel: ProcessChannel, *, owned: bool) -> Self:
        with contextlib.ExitStack() as opened:
            door = None if owned else opened.enter_context(core.process_door(channel.id))
            line = Line(core, channel, await open_job(core), f"process {channel.id}")
            try:
                line.begin(door)
                return cls(await answered(line), owned=owned)
            except BaseException:  # a cancellation too: nobody would have hold of it
                channel.kill()
                line.send()
                line.close()
                raise

    @classmethod
    async def _reached(cls, core: SandboxCore, process_id: str) -> Self:
        channel = ProcessChannel.attach(process_id, output=core.limits.output)
        connection = await in_thread(core.connect_process, process_id)
        line = Line(core, channel, connection, f"process {process_id}")
        try:
            line.begin()
            return cls(await answered(line), owned=False)
        except BaseException:  # whatever it was, the connection is of no use
            line.close()
            raise

    @property
    def id(self) -> str:
        """As :attr:`.Process.id`."""
        return self._channel.id

    @property
    def pid(self) -> int:
        """As :attr:`.Process.pid`."""
        return self._channel.pid

    @property
    def command(self) -> str | tuple[str, ...]:
        """As :attr:`.Process.command`."""
        return self._channel.command

    def events(self) -> AsyncIterator[Output | ExecResult]:
        """As :meth:`.Process.events`."""
        events = _Events(self)
        self._readers.add(events)
        return events

    async def write(self, data: bytes | str) -> None:
        """As :meth:`.Process.write`. A cancellation leaves what was not sent yet to be sent later."""
        self._line.line.check_open()
        self._channel.write(as_bytes(data))
        await self._line.say()
        while self._channel.unsent:
            room = has_room(self._channel, self._deadline)
            left = None if room or self._deadline is None else self._deadline - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._line.wait(listen=room)

    async def close_stdin(self) -> None:
        """As :meth:`.Process.close_stdin`."""
        await self._say(self._channel.close_stdin)

    async def signal(self, number: int) -> None:
        """As :meth:`.Process.signal`."""
        await self._say(lambda: self._channel.signal(number))

    async def resize(self, terminal: Terminal) -> None:
        """As :meth:`.Process.resize`."""
        await self._say(lambda: self._channel.resize(terminal))

    async def kill(self) -> None:
        """As :meth:`.Process.kill`."""
        await self._say(self._channel.kill)

    async def _say(self, verb: Callable[[], None]) -> None:
        self._line.line.check_open()
        verb()
        await self._line.say()

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """As :meth:`.Process.wait`. A cancellation leaves the process as it is."""
        check_wait(timeout)
        if timeout is not None and timeout <= 0:
            self._line.look()  # no turn of the loop is left for it
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self._end()
        except TimeoutError:
            if not limit.expired():
                raise
            raise still_runs(self._channel, timeout) from None

    async def _end(self) -> ExecResult:
        while True:
            shared = self._has_other_readers()
            if not shared:
                self._channel.events.clear()
                self._line.tell()
            if self._channel.result is not None:
                return self._seen(self._channel.result)
            self._channel.check()
            if not shared or has_room(self._channel):
                await self._line.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN):
                        await self._line.wait(listen=False)

    def _has_other_readers(self) -> bool:
        mine = asyncio.current_task()
        return any((task := reader.task()) is not None and task is not mine for reader in self._readers)

    def _seen(self, result: ExecResult) -> ExecResult:
        """Say that somebody has the result: it need not be kept for others."""
        self._channel.acknowledge()
        self._line.line.send()
        return result

    async def _next_event(self) -> Output | ExecResult:
        while not self._channel.events:
            if self._channel.result is not None:
                return self._seen(self._channel.result)
            self._channel.check()
            await self._line.wait()
        self._line.tell()  # a writer may have waited for room
        event = self._channel.events.popleft()
        return self._seen(event) if isinstance(event, ExecResult) else event

    async def close(self) -> None:
        """As :meth:`.Process.close`. It is closed even if this is cancelled."""
        try:
            if self._owned and not self._line.line.closed:
                with contextlib.suppress(SandboxGone, InvalidValue, NotFound, WaitTimeout):  # it is over anyway
                    await self.kill()
                    await self.wait(KILL_PATIENCE)
        finally:
            self._line.close()

    async def __aenter__(self) -> Self:
        """As :meth:`.Process.__enter__`."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """As :meth:`.Process.__exit__`."""
        await self.close()


class _Events:
    """One reader of a process's output."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._over = False
        self._note_task()

    def _note_task(self) -> None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # made before a loop runs
            task = None
        self._task = None if task is None else weakref.ref(task)

    def task(self) -> asyncio.Task[object] | None:
        """Who reads, as far as it still lives."""
        task = None if self._task is None else self._task()
        return None if task is None or task.done() else task

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | ExecResult:
        if self._over:
            raise StopAsyncIteration
        self._note_task()
        event = await self._process._next_event()
        if isinstance(event, ExecResult):
            self._over = True
            self._process._readers.discard(self)
        return event
