"""A long-lived connection that sends and receives without blocking; the sync and async handles add the waiting."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import Generic, Protocol, TypeVar

from minisandbox.errors import InvalidValue, MiniSandboxError, SandboxGone, WaitTimeout
from minisandbox.sandbox import fd_passing
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.protocol.channels import ProcessChannel
from minisandbox.sandbox.protocol.wire import encoded

Channel = TypeVar("Channel", bound="AnyChannel")
MOST_UNREAD = 256
"""Pieces of output that may wait to be read while something else is waited for; a piece has at most 128 KiB."""
KILL_PATIENCE = 5.0
"""Seconds that closing a handle waits for the end of what was killed."""
LOOK_AGAIN = 0.5
"""Seconds after which a waiting reader checks whether the active reader still reads; there is no notification."""
GRACE = 60.0
"""Seconds after a deadline within which its end must have been reported, however busy the machine is; and within which
what is started must have answered."""
_PIECE = 1 << 18


class AnyChannel(Protocol):
    """The common interface of the channels of processes and shells."""

    started: bool
    done: bool

    def start(self) -> bytes:
        """Return what to send first."""

    def outgoing(self) -> bytes:
        """Return what to send now."""

    def feed(self, data: bytes) -> None:
        """Take what was received."""

    def hung_up(self) -> None:
        """Handle that the peer closed."""

    def check(self) -> None:
        """Raise what keeps it from going on."""


class Connection(Generic[Channel]):
    """A channel, its socket, and the bytes that wait to be sent. Not safe for threads.

    Args:
        core: the sandbox.
        channel: the protocol spoken on it.
        connection: its socket.
        name: of the other end, for messages.

    Attributes:
        socket: the connection's current socket.
        over: whether the peer has hung up.
    """

    def __init__(self, core: SandboxCore, channel: Channel, connection: socket.socket, name: str) -> None:
        self.core = core
        self.channel = channel
        self.name = name
        self._pending = bytearray()
        self._failure: MiniSandboxError | None = None
        self.socket = connection
        self.over = False

    def begin(self, door: socket.socket | None = None) -> None:
        """Send the first request.

        Args:
            door: a process's listening socket: travels with the first byte to the supervisor, which keeps it.
        """
        self.socket.setblocking(False)
        self._pending[:] = self.channel.start()
        if door is not None:
            fd_passing.send(self.socket, bytes(self._pending[:1]), [door.fileno()])
            del self._pending[:1]
        self.send()

    def begin_again(self, connection: socket.socket) -> None:
        """Continue with the same channel on another socket."""
        self.socket.close()
        self.socket = connection
        self.over = False
        self.begin()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return bool(self._pending)

    @property
    def closed(self) -> bool:
        """Whether it was closed on this side."""
        return self.socket.fileno() < 0

    def check(self) -> None:
        """Return if something may still arrive, or the last answer has arrived.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        if self._failure is not None:
            raise self._failure

    def check_open(self) -> None:
        """Return if requests may be sent.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        self.check()
        if self.closed:
            raise self._closed_error()

    def _closed_error(self) -> InvalidValue:
        return InvalidValue(f"{self.name}: this handle was closed")

    def send(self) -> None:
        """Send what the socket takes now."""
        self._pending += self.channel.outgoing()
        while self._pending and not self.over:
            try:
                sent = self.socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:  # the peer has hung up; its last answer is still unread
                break
            del self._pending[:sent]
        self._pending.clear()

    def listen(self) -> None:
        """Take what has arrived; the end of the stream has to be followed by :meth:`conclude`."""
        try:
            data = self.socket.recv(_PIECE)
        except (BlockingIOError, ConnectionResetError):  # the latter once, if the peer closed with our bytes unread
            return
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self.over = True

    def _feed(self, data: bytes) -> None:
        try:
            self.channel.feed(data)
        except SandboxGone as error:
            self._failure = error
            self.hang_up()
        else:
            self.send()

    @property
    def inconclusive(self) -> bool:
        """Whether the peer has hung up without a last answer, and the reason is not known yet."""
        return self.over and not self.channel.done and self._failure is None

    def conclude(self, ended: SandboxGone | None) -> None:
        """Take the reason why the peer has hung up without a last answer.

        Args:
            ended: the sandbox's end; None: it lives, and so the peer was killed from inside.
        """
        if not self.inconclusive:
            return
        if ended is None:
            self.channel.hung_up()
        else:
            self._failure = ended

    def reason(self) -> SandboxGone | None:
        """Return why the sandbox has ended, or None if it lives; blocks for a moment."""
        try:
            self.core.check_alive()
        except SandboxGone as error:
            return error
        return None

    def hang_up(self) -> None:
        """Shut the socket down, so that callers that wait on it see its end."""
        if self._failure is None and not self.channel.done:
            self._failure = self._closed_error()
        with contextlib.suppress(OSError):  # not connected any more
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.hang_up()
        self.socket.close()


class Queue:
    """The callers that wait for a shell, which runs one script at a time, and their deadlines."""

    def __init__(self) -> None:
        self._under_way = 0
        self._until = 0.0

    def join(self, timeout: float | None) -> float | None:
        """Stand in line.

        Args:
            timeout: wall seconds that this script may take; None: no limit.

        Returns:
            When it must have ended, as time.monotonic() counts; None if that is unknown.
        """
        begin = max(time.monotonic(), self._until if self._under_way else 0.0)
        self._until = math.inf if timeout is None else begin + timeout + GRACE
        self._under_way += 1
        return None if math.isinf(self._until) else self._until

    def leave(self) -> None:
        """Note that the script has ended, or that its caller was interrupted."""
        self._under_way -= 1


def has_room(channel: ProcessChannel, deadline: float | None = None) -> bool:
    """Return whether more unread output may be taken.

    Args:
        channel: the process's.
        deadline: when its timeout ends it, as time.monotonic() counts. From then on there is always room: its last word
            comes after its output, and who writes to it is the only one who could hear it.
    """
    return len(channel.events) < MOST_UNREAD or (deadline is not None and time.monotonic() >= deadline)


def as_bytes(data: bytes | str) -> bytes:
    """Return data to be written as bytes."""
    return encoded(data) if isinstance(data, str) else bytes(data)


def still_runs(channel: ProcessChannel, timeout: float | None) -> WaitTimeout:
    """Return the error for a wait that was too short."""
    return WaitTimeout(f"process {channel.id} still runs after {timeout} s", hint="wait longer, or kill it")
