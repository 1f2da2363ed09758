"""Asynchronous primitives, for tasks of one event loop; :mod:`.io_sync` has the same names for threads.

The loop does what can be done without waiting. What blocks for a moment runs in threads of our own.
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

from minisandbox.sandbox.backend import Returned, SandboxCore, advance, conclude, mark_unresponsive
from minisandbox.sandbox.protocol.connection import GRACE, Channel, Connection
from minisandbox.sandbox.protocol.wire import Call, Operation

P = ParamSpec("P")
T = TypeVar("T")
_PIECE = 1 << 18
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_THREADS = 64


# --- what blocks -----------------------------------------------------------------------------------------------------


async def call_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that blocks, in a thread of ours.

    It runs to its end even if this is cancelled meanwhile; the cancellation is raised then.
    """
    return await _settled(_begin(function, *args, **kwargs))


async def call_or_undo(
    undo: Callable[[T], object], function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that blocks, and undo what it made if this is cancelled meanwhile."""
    work = _begin(function, *args, **kwargs)
    try:
        return await _settled(work)
    except asyncio.CancelledError:
        if not work.cancelled() and work.exception() is None:
            await call_blocking(undo, work.result())
        raise


@functools.cache
def _threads(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a fork has none of its parent's threads
    """Return the threads of a process.

    Those of the event loop are few (processors + 4), and the caller's own code may keep them all busy.
    """
    return ThreadPoolExecutor(_THREADS, "minisandbox")


def _begin(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Begin a call in a thread; a task, as of asyncio.to_thread, would be cancelled by the end of asyncio.run."""
    context = contextvars.copy_context()
    bound = functools.partial(function, *args, **kwargs)
    return asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), context.run, bound)


async def _settled(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # once more: it is raised below
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not log it
        raise


# --- calls -----------------------------------------------------------------------------------------------------------


class _Run(Protocol):
    """Calls a function, on the loop or in a thread."""

    async def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


async def _on_loop(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


async def carry_out(core: SandboxCore, operation: Operation[T], *, disk: bool = False) -> T:
    """Carry out an operation's calls, one after another; a cancellation ends what the sandbox does for it.

    Args:
        core: the sandbox.
        operation: what to do; closed at the end, also after an error.
        disk: whether it reads or writes host files, which is then done in a thread.

    Returns:
        What the operation returns.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    run: _Run = call_blocking if disk else _on_loop
    try:
        while not isinstance(call := await run(advance, operation), Returned):
            await _drive(core, call, run)
        return call.value
    finally:
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
            # The kernel keeps only so many jobs for the sandbox, and nothing tells when a listening socket has room
            # again (connect(2): EAGAIN). So we poll, more and more rarely.
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            connection.setblocking(False)
            return connection


async def _drive(core: SandboxCore, call: Call, run: _Run) -> None:
    """Carry out a call on a socket of its own. Leaving early closes the socket, which ends the command's tree."""
    with await open_job(core) as connection:
        try:
            await _converse(call, connection, run)
        except _NoAnswerError:
            raise await call_blocking(mark_unresponsive, core) from None
    if not call.done:
        await call_blocking(conclude, core, call)


async def _converse(call: Call, connection: socket.socket, run: _Run) -> None:
    loop = asyncio.get_running_loop()
    pieces = call.outgoing()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its answer says why
        while (piece := await run(next, pieces, None)) is not None:
            await _within(call.patience, loop.sock_sendall(connection, piece))
    while not call.done and (data := await _receive(connection, call.patience)):
        await run(call.feed, data)


async def _receive(connection: socket.socket, patience: float | None) -> bytes:
    """Return some bytes, or none at the end of the stream."""
    loop = asyncio.get_running_loop()
    for _ in range(2):  # reported once if the peer closed with our bytes unread; its answer still waits
        with contextlib.suppress(ConnectionResetError):
            return await _within(patience, loop.sock_recv(connection, _PIECE))
    return b""


async def _within(patience: float | None, step: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(patience):
            return await step
    except TimeoutError as error:
        raise _NoAnswerError from error


class _NoAnswerError(Exception):
    """The sandbox was silent for longer than its patience."""


# --- connections that last -------------------------------------------------------------------------------------------


class AsyncSharedConnection(Connection[Channel]):
    """A connection that tasks of one event loop share.

    The loop watches the socket while a task waits, and not otherwise: unread output stays in the socket, and
    makes its sender wait. No task reads for the others, so that no byte is lost between a socket and a cancelled task.

    Attributes:
        lock: does nothing here; tasks switch only where they await.
    """

    def __init__(self, core: SandboxCore, channel: Channel, connection: socket.socket, name: str) -> None:
        super().__init__(core, channel, connection, name)
        self.lock = contextlib.nullcontext()
        self._waiting: dict[asyncio.Future[None], bool] = {}

    async def answered(self) -> None:
        """Wait until the other end reports that it runs.

        Raises:
            MiniSandboxError: what keeps it from running.
            SandboxGone: there is no answer; the sandbox was stopped if it is ours.
        """
        deadline = time.monotonic() + GRACE
        while not (self.channel.started or self.channel.done):
            if not await self.wait(deadline):
                raise await call_blocking(mark_unresponsive, self.core)
        self.channel.check()

    async def say(self) -> None:
        """Send what the channel has queued, waiting while the socket takes none of it."""
        self.send()
        while self.unsent and not self.closed:
            await self.wait(listen=False)

    async def wait(self, deadline: float | None = None, *, listen: bool = True) -> bool:
        """Wait until something has happened.

        Args:
            deadline: when to stop waiting, as time.monotonic() counts.
            listen: whether to take what has arrived; False if it would not be read.

        Returns:
            Whether the deadline was still ahead. If it was not, what had arrived before was taken all the same.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        self.check()
        remaining = None if deadline is None else deadline - time.monotonic()
        in_time = remaining is None or remaining > 0
        if in_time and not self.inconclusive:
            await self._news(remaining, listen=listen)
        elif listen and not self.closed and not self.over:
            self._listen()
        if self.inconclusive:
            self.conclude(await call_blocking(self.reason))
        self.check()
        return in_time

    async def _news(self, remaining: float | None, *, listen: bool) -> None:
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
        """Have the loop watch for what the waiting tasks want."""
        if self.closed:  # close() has told the loop
            return
        if any(self._waiting.values()) and not self.over:
            loop.add_reader(self.socket, self._listen)
        else:
            loop.remove_reader(self.socket)
        if self._waiting and self.unsent:
            loop.add_writer(self.socket, self._send)
        else:
            loop.remove_writer(self.socket)

    def _listen(self) -> None:
        self.listen()
        self.tell()

    def _send(self) -> None:
        self.send()
        self.tell()

    def tell(self) -> None:
        """Wake all tasks that wait."""
        for event in self._waiting:
            _wake(event)

    def close(self) -> None:
        """Close the connection, also under tasks that wait on it; calling it again does nothing."""
        if not self.closed:
            self._watch_no_more()
            super().close()
            self.tell()

    def begin_again(self, connection: socket.socket) -> None:
        """Continue with the same channel on another socket."""
        self._watch_no_more()
        super().begin_again(connection)
        self.tell()

    def _watch_no_more(self) -> None:
        with contextlib.suppress(RuntimeError):  # without a running loop there are no watchers
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.socket)
            loop.remove_writer(self.socket)


def _wake(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)


class AsyncCaller:
    """The task that made this object."""

    def __init__(self) -> None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # made before a loop runs
            task = None
        self._task = None if task is None else weakref.ref(task)

    def is_another(self) -> bool:
        """Return whether it is a live task other than the current one."""
        task = None if self._task is None else self._task()
        return task is not None and not task.done() and task is not asyncio.current_task()
