"""Synchronous primitives for threads; :mod:`.io_async` has the same names for the tasks of an event loop."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox.backend import Returned, SandboxCore, advance, conclude, mark_unresponsive
from minisandbox.sandbox.protocol.connection import GRACE, Channel, Connection
from minisandbox.sandbox.protocol.wire import Call, Operation

P = ParamSpec("P")
T = TypeVar("T")
_PIECE = 1 << 16
"""Bytes to receive at once: malloc(3) would map and unmap a larger buffer for every answer."""


def call_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function."""
    return function(*args, **kwargs)


def call_or_undo(
    undo: Callable[[T], object],  # noqa: ARG001 - an interrupted function leaves nothing to undo
    function: Callable[P, T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call a blocking function, which cleans up after itself when it is interrupted."""
    return function(*args, **kwargs)


# --- calls -----------------------------------------------------------------------------------------------------------


def carry_out(
    core: SandboxCore,
    operation: Operation[T],
    *,
    disk: bool = False,  # noqa: ARG001 - as in io_async
    early: bool = False,
) -> T:
    """Run the calls of an operation one after another.

    Args:
        core: the sandbox.
        operation: the operation; it is closed at the end, also after an error.
        disk: whether it reads or writes host files; ignored here.
        early: whether to open the first call's job before the operation builds its request, so that a worker wakes up
            meanwhile.

    Returns:
        The value of the operation.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    connection: socket.socket | None = None
    try:
        if early:
            with contextlib.suppress(MiniSandboxError):  # report an invalid argument first; the call opens a job again
                connection = core.open_job()
        while not isinstance(call := advance(operation), Returned):
            _drive(core, call, connection)
            connection = None
        return call.value
    finally:
        if connection is not None:
            connection.close()
        operation.close()


def open_job(core: SandboxCore) -> socket.socket:
    """Return a socket of a new job.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    return core.open_job()


def _drive(core: SandboxCore, call: Call, early: socket.socket | None) -> None:
    """Run a call on a socket of its own. An exception closes the socket, which kills the command's process tree."""
    with early or core.open_job() as connection:
        connection.settimeout(call.patience)
        try:
            converse(call, connection)
        except TimeoutError:
            raise mark_unresponsive(core) from None
    conclude(core, call)


def converse(call: Call, connection: socket.socket, deadline: float | None = None) -> None:
    """Send a call's request and feed it the answer, until the call is done or the peer hangs up.

    Args:
        call: the call.
        connection: a job's socket; its timeout bounds each wait.
        deadline: time.monotonic() at which the whole exchange must be done; None if only each wait is bounded.

    Raises:
        TimeoutError: the socket's timeout or the deadline has passed.
        SandboxGone: the peer's answer is malformed.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the peer's answer gives the reason
        for chunk in call.outgoing():
            _limit(connection, deadline)
            connection.sendall(chunk)
    while not call.done:
        _limit(connection, deadline)
        if not (data := _receive(connection)):
            break
        call.feed(data)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    """Set the socket's timeout to the time until the deadline; raise TimeoutError if it has passed."""
    if deadline is None:
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    connection.settimeout(remaining)


def _receive(connection: socket.socket) -> bytes:
    """Receive available bytes; return b"" at the end of the stream."""
    for _ in range(2):  # the kernel reports a reset once if the peer left bytes unread; then comes its answer
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(_PIECE)
    return b""


# --- long-lived connections ------------------------------------------------------------------------------------------


class SharedConnection(Connection[Channel]):
    """A connection that threads share: one thread receives, and the others wait until it notifies them.

    Hold :attr:`lock` for every method except :meth:`close` and :meth:`answered`.

    Attributes:
        lock: guards the connection and its channel.
    """

    def __init__(self, core: SandboxCore, channel: Channel, connection: socket.socket, name: str) -> None:
        super().__init__(core, channel, connection, name)
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._listening = False
        self._sending = False

    def answered(self) -> None:
        """Wait until the peer reports that its process or shell has started.

        Raises:
            MiniSandboxError: the process or shell could not be started.
            SandboxGone: there is no answer; an owned sandbox was stopped.
        """
        deadline = time.monotonic() + GRACE
        with self.lock:
            while not (self.channel.started or self.channel.done):
                if not self.wait(deadline):
                    raise mark_unresponsive(self.core)
        self.channel.check()

    def flush(self) -> None:
        """Send the channel's queued requests, waiting until the socket has accepted them."""
        self.send()
        while self.unsent and not self.closed:
            self.wait(listen=False)

    def wait(self, deadline: float | None = None, *, listen: bool = True) -> bool:
        """Wait for an event on the connection, in this thread or reported by another.

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
        listen = listen and not self._listening
        send = self.unsent and not self._sending
        if listen or send:
            self._move(remaining, listen=listen, send=send)
        elif has_time:
            self._changed.wait(None if remaining is None else min(remaining, threading.TIMEOUT_MAX))
        self.check()
        return has_time

    def _move(self, remaining: float | None, *, listen: bool, send: bool) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN * listen | select.POLLOUT * send)
        self._listening |= listen
        self._sending |= send
        try:
            with self._unlocked():
                # limit the wait, because poll(2) takes an int of milliseconds; the caller waits again
                events = poll.poll(None if remaining is None else min(max(remaining * 1000, 0.0), 1e9))
            occurred_events = sum(event for _, event in events)  # there is only one descriptor
            if send and occurred_events & ~select.POLLIN:
                self.send()
            if listen and occurred_events & ~select.POLLOUT:
                self.listen()
                if self.inconclusive:
                    self.conclude(self.reason())
        finally:
            self._listening &= not listen
            self._sending &= not send
            self._changed.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def wake_waiters(self) -> None:
        """Wake all waiting threads."""
        self._changed.notify_all()

    def close(self) -> None:
        """Close the connection and wake the threads that wait on it; calling it again does nothing."""
        with self.lock:
            self.hang_up()
            while self._listening or self._sending:
                self._changed.wait()
            super().close()
            self._changed.notify_all()


class Caller:
    """Remembers the thread that created this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def is_another(self) -> bool:
        """Return whether that thread is still alive and is not the current one."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()
