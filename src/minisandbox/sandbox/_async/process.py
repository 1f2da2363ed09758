"""Handles on running processes of an asynchronous sandbox."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable
from operator import methodcaller
from typing import Self

from minisandbox.errors import InvalidValue, SandboxGone, WaitTimeout
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.io_async import AsyncCaller, AsyncSharedConnection, call_or_undo, open_job
from minisandbox.sandbox.protocol.channels import ProcessChannel
from minisandbox.sandbox.protocol.connection import KILL_PATIENCE, LOOK_AGAIN, as_bytes, has_room, still_runs
from minisandbox.sandbox.validation import check_wait
from minisandbox.types import ExecResult, Output, Terminal


class AsyncProcess:
    """A running process. Create it with :meth:`.AsyncSandbox.start` or :meth:`.AsyncSandbox.process`.

    It is an asynchronous context manager. Tasks of one event loop may share it, for example to read in one and write
    in another. A cancellation during a wait loses no output.

    Unread output makes the process wait. Its standard input is an open pipe until :meth:`close_stdin`. A terminal has
    only one output, ``stdout``. Every method raises :class:`.SandboxGone` once the sandbox has ended, and
    :class:`.InvalidValue` once the handle was closed.

    Args:
        connection: connection to the supervisor of the process, which has answered.
        owned: whether the process is killed when this handle is closed.
    """

    def __init__(self, connection: AsyncSharedConnection[ProcessChannel], *, owned: bool) -> None:
        self._connection = connection
        self._channel = connection.channel
        self._owned = owned
        self._deadline = None if self._channel.remaining is None else time.monotonic() + self._channel.remaining
        self._readers: weakref.WeakSet[_Events] = weakref.WeakSet()

    @classmethod
    async def _started(cls, core: SandboxCore, channel: ProcessChannel, *, owned: bool) -> Self:
        with contextlib.ExitStack() as stack:
            listener = None if owned else stack.enter_context(core.process_listener(channel.id))
            connection = AsyncSharedConnection(core, channel, await open_job(core), f"process {channel.id}")
            try:
                connection.begin(listener)
                await connection.answered()
                return cls(connection, owned=owned)
            except BaseException:  # even on an interrupt, because the process would run without a handle
                channel.kill()
                connection.send()
                connection.close()
                raise

    @classmethod
    async def _reached(cls, core: SandboxCore, process_id: str) -> Self:
        channel = ProcessChannel.attach(process_id, output=core.limits.output)
        socket = await call_or_undo(methodcaller("close"), core.connect_process, process_id)
        connection = AsyncSharedConnection(core, channel, socket, f"process {process_id}")
        try:
            connection.begin()
            await connection.answered()
            return cls(connection, owned=False)
        except BaseException:  # even on an interrupt
            connection.close()
            raise

    @property
    def id(self) -> str:
        """Its id, unique in the sandbox, to pass to :meth:`.AsyncSandbox.process`."""
        return self._channel.id

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox."""
        return self._channel.pid

    @property
    def command(self) -> str | tuple[str, ...]:
        """The command, as given."""
        return self._channel.command

    def events(self) -> AsyncIterator[Output | ExecResult]:
        """Iterate over the output of the process as it arrives, and finally its result.

        If there are several readers, each piece goes to only one of them. The result contains the head and the tail of
        the output too.

        Returns:
            An iterator over pieces of output; the last item is the result.

        Raises:
            NotFound: another handle took over the process.
            SandboxGone: the sandbox has ended.
        """
        events = _Events(self)
        with self._connection.lock:
            self._readers.add(events)
        return events

    async def write(self, data: bytes | str) -> None:
        """Write to the standard input of the process; wait while 1 MiB of input is unread.

        Data written after the process has exited is dropped. After a cancellation, unsent data is still sent later.

        Args:
            data: bytes, or text to encode as UTF-8.

        Raises:
            InvalidValue: standard input was closed.
            SandboxGone: the sandbox has ended.
        """
        with self._connection.lock:
            self._connection.check_open()
            self._channel.write(as_bytes(data))
            await self._connection.flush()
            while self._channel.unsent:
                has_capacity = has_room(self._channel, self._deadline)
                await self._connection.wait(None if has_capacity else self._deadline, listen=has_capacity)

    async def close_stdin(self) -> None:
        """Close standard input, or type ^D on a terminal; calling it again does nothing."""
        await self._say(self._channel.close_stdin)

    async def signal(self, number: int) -> None:
        """Send a signal to the process itself, not to its children.

        Args:
            number: the signal, for example ``signal.SIGINT``.

        Raises:
            InvalidValue: there is no such signal.
            SandboxGone: the sandbox has ended.
        """
        await self._say(lambda: self._channel.signal(number))

    async def resize(self, terminal: Terminal) -> None:
        """Resize the terminal of the process.

        Args:
            terminal: the new size.

        Raises:
            InvalidValue: the process has no terminal.
            SandboxGone: the sandbox has ended.
        """
        await self._say(lambda: self._channel.resize(terminal))

    async def kill(self) -> None:
        """Kill the process and all its descendants; :meth:`wait` returns when they have exited."""
        await self._say(self._channel.kill)

    async def _say(self, queue_request: Callable[[], None]) -> None:
        with self._connection.lock:
            self._connection.check_open()
            queue_request()
            await self._connection.flush()

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait until the process has exited. A cancellation does not affect the process.

        Output that arrives meanwhile is kept for the result, head and tail as for :meth:`.AsyncSandbox.exec`. Readers
        of :meth:`events` still get every piece.

        Args:
            timeout: seconds after which to give up; the process keeps running. None: no limit.

        Returns:
            The exit status, and the output that this handle has received.

        Raises:
            WaitTimeout: the process did not exit in time.
            NotFound: another handle took over the process.
            SandboxGone: the sandbox has ended.
        """
        check_wait(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._connection.lock:
            while True:
                is_shared = any(reader.caller.is_another() for reader in self._readers)
                if not is_shared:
                    self._channel.events.clear()
                    self._connection.wake_waiters()
                if self._channel.result is not None:
                    return self._acknowledge(self._channel.result)
                self._channel.check()
                has_capacity = not is_shared or has_room(self._channel)
                if not await self._wait(deadline, has_capacity=has_capacity) and self._channel.result is None:
                    raise still_runs(self._channel, timeout)

    async def _wait(self, deadline: float | None, *, has_capacity: bool) -> bool:
        next_check = time.monotonic() + LOOK_AGAIN
        if has_capacity or (deadline is not None and deadline <= next_check):
            return await self._connection.wait(deadline, listen=has_capacity)
        await self._connection.wait(next_check, listen=False)
        return True

    def _acknowledge(self, result: ExecResult) -> ExecResult:
        """Acknowledge the result, so that the supervisor need not keep it for other handles."""
        self._channel.acknowledge()
        self._connection.send()
        return result

    async def _next_event(self) -> Output | ExecResult:
        with self._connection.lock:
            while not self._channel.events:
                if self._channel.result is not None:
                    return self._acknowledge(self._channel.result)
                self._channel.check()
                await self._connection.wait()
            self._connection.wake_waiters()  # a writer may wait for this piece to be consumed
            event = self._channel.events.popleft()
            return self._acknowledge(event) if isinstance(event, ExecResult) else event

    def _forget_reader(self, reader: _Events) -> None:
        with self._connection.lock:  # another caller may iterate over the readers
            self._readers.discard(reader)

    async def close(self) -> None:
        """Close the handle. A process with ``lifetime="handle"`` is killed; with ``"sandbox"`` it keeps running.

        Calling it again does nothing.
        """
        try:
            if self._owned and not self._connection.closed:
                with contextlib.suppress(SandboxGone, InvalidValue, WaitTimeout):  # the process has exited anyway
                    await self.kill()
                    await self.wait(KILL_PATIENCE)
        finally:
            self._connection.close()

    async def __aenter__(self) -> Self:
        """Use the process in an ``async with`` block, which closes the handle at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the handle."""
        await self.close()


class _Events:
    """One reader of a process's output."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._is_over = False
        self.caller = AsyncCaller()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | ExecResult:
        if self._is_over:
            raise StopAsyncIteration
        self.caller = AsyncCaller()
        event = await self._process._next_event()
        if isinstance(event, ExecResult):
            self._is_over = True
            self._process._forget_reader(self)
        return event
