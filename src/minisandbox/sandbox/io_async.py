"""Asynchronous primitives for the tasks of one event loop; :mod:`.io_sync` has the same names for threads.

Non-blocking work runs on the event loop, and blocking work in a thread pool of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import socket
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox.backend import Returned, SandboxCore, advance, conclude, mark_unresponsive
from minisandbox.sandbox.protocol.connection import GRACE, Channel, Connection
from minisandbox.sandbox.protocol.wire import Call, Operation

P = ParamSpec("P")
T = TypeVar("T")
_PIECE = 1 << 16
"""Bytes to receive at once: malloc(3) would map and unmap a larger buffer for every answer."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_THREADS = 64


# --- blocking calls --------------------------------------------------------------------------------------------------


async def call_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in a thread.

    The function always runs to its end; a cancellation is raised afterwards.
    """
    return await _settled(_begin(function, *args, **kwargs))


async def call_or_undo(
    undo: Callable[[T], object], function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a blocking function in a thread, and undo its result if the caller is cancelled meanwhile."""
    future = _begin(function, *args, **kwargs)
    try:
        return await _settled(future)
    except asyncio.CancelledError:
        if not future.cancelled() and future.exception() is None:
            await call_blocking(undo, future.result())
        raise


@functools.cache
def _threads(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001 - the cache key: a forked child needs a new pool
    """Return the thread pool of a process.

    The event loop's default pool has few threads (processors + 4), and the caller's code may keep all of them busy.
    """
    return ThreadPoolExecutor(_THREADS, "minisandbox")


def _begin(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Start a function in a thread, as a future, because asyncio.run cancels tasks at its end."""
    context = contextvars.copy_context()
    function_call = functools.partial(function, *args, **kwargs)
    return asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), context.run, function_call)


async def _settled(future: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # a repeated cancellation; the first is raised below
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # retrieve the exception, or asyncio logs it
        raise


# --- calls -----------------------------------------------------------------------------------------------------------


class _Run(Protocol):
    """Calls a function, on the event loop or in a thread."""

    async def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


async def _on_loop(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


async def carry_out(core: SandboxCore, operation: Operation[T], *, disk: bool = False, early: bool = False) -> T:
    """Run the calls of an operation one after another; a cancellation also stops the work inside the sandbox.

    Args:
        core: the sandbox.
        operation: the operation; it is closed at the end, also after an error.
        disk: whether it reads or writes host files, and so must run in a thread.
        early: whether to open the first call's job before the operation builds its request, so that a worker wakes up
            meanwhile.

    Returns:
        The value of the operation.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    run: _Run = call_blocking if disk else _on_loop
    connection: socket.socket | None = None
    try:
        if early:
            with contextlib.suppress(MiniSandboxError):  # report an invalid argument first; the call opens a job again
                connection = await open_job(core)
        while not isinstance(call := await run(advance, operation), Returned):
            await _drive(core, call, run, connection)
            connection = None
        return call.value
    finally:
        if connection is not None:
            connection.close()
        await run(operation.close)


async def open_job(core: SandboxCore) -> socket.socket:
    """Return a non-blocking socket of a new job.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            connection = core.open_job(wait=False)
        except BlockingIOError:
            # Retry with backoff: the kernel queues a limited number of jobs (connect(2): EAGAIN), and it sends no event
            # when the queue has room again.
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            connection.setblocking(False)
            return connection


async def _drive(core: SandboxCore, call: Call, run: _Run, early: socket.socket | None) -> None:
    """Run a call on a socket of its own. An exception closes the socket, which kills the command's process tree."""
    with early or await open_job(core) as connection:
        try:
            await _converse(call, connection, run)
        except _NoAnswerError:
            raise await call_blocking(mark_unresponsive, core) from None
    if not call.done:
        await call_blocking(conclude, core, call)


async def _converse(call: Call, connection: socket.socket, run: _Run) -> None:
    loop = asyncio.get_running_loop()
    chunks = call.outgoing()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the peer's answer gives the reason
        while (chunk := await run(next, chunks, None)) is not None:
            await _within(call.patience, loop.sock_sendall(connection, chunk))
    while not call.done and (data := await _receive(connection, call.patience)):
        await run(call.feed, data)


async def _receive(connection: socket.socket, patience: float | None) -> bytes:
    """Receive available bytes; return b"" at the end of the stream."""
    loop = asyncio.get_running_loop()
    for _ in range(2):  # the kernel reports a reset once if the peer left bytes unread; then comes its answer
        with contextlib.suppress(ConnectionResetError):
            return await _within(patience, loop.sock_recv(connection, _PIECE))
    return b""


async def _within(patience: float | None, awaitable: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(patience):
            return await awaitable
    except TimeoutError as error:
        raise _NoAnswerError from error


class _NoAnswerError(Exception):
    """The sandbox sent nothing for longer than the call's ``patience``."""


# --- long-lived connections ------------------------------------------------------------------------------------------


class AsyncSharedConnection(Connection[Channel]):
    """A connection that tasks of one event loop share.

    The event loop watches the socket only while a task waits. Otherwise unread output stays in the socket, and its
    sender has to wait. The loop's callbacks read, not a task, so a cancelled task cannot lose bytes.

    Attributes:
        lock: a context manager without effect; tasks need no lock, because they switch only at an await.
    """

    def __init__(self, core: SandboxCore, channel: Channel, connection: socket.socket, name: str) -> None:
        super().__init__(core, channel, connection, name)
        self.lock = contextlib.nullcontext()
        self._waiting: dict[asyncio.Future[None], bool] = {}

    async def answered(self) -> None:
        """Wait until the peer reports that its process or shell has started.

        Raises:
            MiniSandboxError: the process or shell could not be started.
            SandboxGone: there is no answer; an owned sandbox was stopped.
        """
        deadline = time.monotonic() + GRACE
        while not (self.channel.started or self.channel.done):
            if not await self.wait(deadline):
                raise await call_blocking(mark_unresponsive, self.core)
        self.channel.check()

    async def flush(self) -> None:
        """Send the channel's queued requests, waiting until the socket has accepted them."""
        self.send()
        while self.unsent and not self.closed:
            await self.wait(listen=False)

    async def wait(self, deadline: float | None = None, *, listen: bool = True) -> bool:
        """Wait for an event on the connection.

        Args:
            deadline: time.monotonic() at which to stop waiting.
            listen: whether to receive data; False if the caller would not consume it.

        Returns:
            Whether the deadline had not passed at the call. Data that had arrived by then is received in any case.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        self.check()
        remaining = None if deadline is None else deadline - time.monotonic()
        has_time = remaining is None or remaining > 0
        if has_time and not self.inconclusive:
            await self._wait_for_event(remaining, listen=listen)
        elif listen and not self.closed and not self.peer_closed:
            self._listen()
        if self.inconclusive:
            self.conclude(await call_blocking(self.reason))
        self.check()
        return has_time

    async def _wait_for_event(self, remaining: float | None, *, listen: bool) -> None:
        loop = asyncio.get_running_loop()
        event = loop.create_future()
        timer = None if remaining is None else loop.call_later(remaining, _wake, event)
        self._waiting[event] = listen
        self._watch(loop)
        try:
            await event
        finally:
            del self._waiting[event]
            self._watch(loop)
            if timer is not None:
                timer.cancel()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the event loop watch the socket for those events that the waiting tasks need."""
        if self.closed:  # close() has removed the watchers
            return
        if any(self._waiting.values()) and not self.peer_closed:
            loop.add_reader(self.socket, self._listen)
        else:
            loop.remove_reader(self.socket)
        if self._waiting and self.unsent:
            loop.add_writer(self.socket, self._send)
        else:
            loop.remove_writer(self.socket)

    def _listen(self) -> None:
        self.listen()
        self.wake_waiters()

    def _send(self) -> None:
        self.send()
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake all waiting tasks."""
        for event in self._waiting:
            _wake(event)

    def close(self) -> None:
        """Close the connection and wake the tasks that wait on it; calling it again does nothing."""
        if not self.closed:
            self._watch_no_more()
            super().close()
            self.wake_waiters()

    def begin_again(self, connection: socket.socket) -> None:
        """Continue with the same channel on another socket."""
        self._watch_no_more()
        super().begin_again(connection)
        self.wake_waiters()

    def _watch_no_more(self) -> None:
        with contextlib.suppress(RuntimeError):  # without a running loop there are no watchers
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.socket)
            loop.remove_writer(self.socket)


def _wake(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)


class AsyncCaller:
    """Remembers the task that created this object."""

    def __init__(self) -> None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # created outside of an event loop
            task = None
        self._task = None if task is None else weakref.ref(task)

    def is_another(self) -> bool:
        """Return whether that task is still alive and is not the current one."""
        task = None if self._task is None else self._task()
        return task is not None and not task.done() and task is not asyncio.current_task()
