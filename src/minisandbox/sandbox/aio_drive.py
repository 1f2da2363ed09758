"""Carrying calls through on the running event loop; what blocks runs in threads of our own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from minisandbox.sandbox.handles import Returned, SandboxCore, advance, conclude, give_up
from minisandbox.sandbox.wire import Call, Operation

P = ParamSpec("P")
T = TypeVar("T")
_PIECE = 1 << 18
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_THREADS = 64


# --- threads ---------------------------------------------------------------------------------------------------------


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call something that blocks for a moment in a thread of ours.

    It runs to its end even if this is cancelled meanwhile; the cancellation is raised then.
    """
    return await _settled(_begin(function, *args, **kwargs))


async def kept_or_undone(
    undo: Callable[[T], object], function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """As :func:`in_thread`; what was made in vain because of a cancellation is undone."""
    work = _begin(function, *args, **kwargs)
    try:
        return await _settled(work)
    except asyncio.CancelledError:
        if not work.cancelled() and work.exception() is None:
            await in_thread(undo, work.result())
        raise


@functools.cache
def _threads(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a fork has none of its parent's threads
    """The threads of a process.

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
            work.exception()  # looked at: nobody is left to tell
        raise


# --- calls -----------------------------------------------------------------------------------------------------------


class _Run(Protocol):
    """Calls a function, here and now or in a thread."""

    async def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


async def _here(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


async def carry_out(core: SandboxCore, operation: Operation[T], *, disk: bool = False) -> T:
    """Carry an operation's calls out one after another; a cancellation ends what the sandbox does for it.

    Args:
        core: the sandbox.
        operation: what to do; closed at the end, however it comes.
        disk: whether it reads or writes host files, which is then done in a thread.

    Returns:
        What the operation returns.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    run: _Run = in_thread if disk else _here
    try:
        while not isinstance(call := await run(advance, operation), Returned):
            await _drive(core, call, run)
        return call.value
    finally:
        await run(operation.close)


async def open_job(core: SandboxCore) -> socket.socket:
    """A non-blocking socket of a new job.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            connection = core.open_job(wait=False)
        except BlockingIOError:
            # As many jobs are under way to the sandbox as the kernel keeps. Nothing tells when a listening socket has
            # room again (connect(2): EAGAIN), so it is asked, more and more rarely.
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            connection.setblocking(False)
            return connection


async def _drive(core: SandboxCore, call: Call, run: _Run) -> None:
    """Carry a call through on a socket of its own. Leaving early closes the socket, which ends the command's tree."""
    with await open_job(core) as connection:
        try:
            await _converse(call, connection, run)
        except _NoAnswerError:
            raise await in_thread(give_up, core) from None
    if not call.done:
        await in_thread(conclude, core, call)


async def _converse(call: Call, connection: socket.socket, run: _Run) -> None:
    loop = asyncio.get_running_loop()
    pieces = call.outgoing()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its answer says why
        while (piece := await run(next, pieces, None)) is not None:
            await _within(call.patience, loop.sock_sendall(connection, piece))
    while not call.done and (data := await _receive(connection, call.patience)):
        await run(call.feed, data)


async def _receive(connection: socket.socket, patience: float | None) -> bytes:
    """Some bytes, or none at the end of the stream."""
    loop = asyncio.get_running_loop()
    for _ in range(2):  # reported once where the peer closed with our bytes unread; its answer still waits
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
    """The sandbox said nothing for longer than it may."""
