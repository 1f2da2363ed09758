"""A long-lived connection that never blocks; the sync and async handles add the waiting."""

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
"""Maximum pieces of unread output while a caller waits for another event; a piece has at most 128 KiB."""
KILL_PATIENCE = 5.0
"""Seconds that closing a handle waits for the killed process to exit."""
LOOK_AGAIN = 0.5
"""Seconds after which wait() checks again for other readers, which do not announce that they have left."""
GRACE = 60.0
"""Seconds after a deadline within which the result must arrive, even on a busy machine. A new process or shell must
answer within this time too."""
_PIECE = 1 << 18


class AnyChannel(Protocol):
    """The common interface of the channels of processes and shells."""

    started: bool
    done: bool

    def start(self) -> bytes:
        """Return the first request on a new connection."""

    def outgoing(self) -> bytes:
        """Return the bytes to send now."""

    def feed(self, data: bytes) -> None:
        """Process received bytes."""

    def hung_up(self) -> None:
        """Handle the end of the stream."""

    def check(self) -> None:
        """Raise the error if the process or shell could not be started."""


class Connection(Generic[Channel]):
    """A channel with its socket and its unsent bytes. Not thread-safe.

    Args:
        core: the sandbox.
        channel: the protocol of the connection.
        connection: the socket.
        name: name of the process or shell, for messages.

    Attributes:
        socket: the current socket.
        peer_closed: whether the peer has hung up.
    """

    def __init__(self, core: SandboxCore, channel: Channel, connection: socket.socket, name: str) -> None:
        self.core = core
        self.channel = channel
        self.name = name
        self._pending = bytearray()
        self._failure: MiniSandboxError | None = None
        self.socket = connection
        self.peer_closed = False

    def begin(self, listener: socket.socket | None = None) -> None:
        """Send the first request.

        Args:
            listener: listening socket of a process, sent with the first byte to the supervisor, which holds it open.
        """
        self.socket.setblocking(False)
        self._pending[:] = self.channel.start()
        if listener is not None:
            fd_passing.send(self.socket, bytes(self._pending[:1]), [listener.fileno()])
            del self._pending[:1]
        self.send()

    def begin_again(self, connection: socket.socket) -> None:
        """Continue with the same channel on another socket."""
        self.socket.close()
        self.socket = connection
        self.peer_closed = False
        self.begin()

    @property
    def unsent(self) -> bool:
        """Whether bytes remain that the socket has not accepted yet."""
        return bool(self._pending)

    @property
    def closed(self) -> bool:
        """Whether this side has closed the connection."""
        return self.socket.fileno() < 0

    def check(self) -> None:
        """Raise the error if the connection has failed.

        Raises:
            InvalidValue: the handle was closed.
            SandboxGone: the sandbox has ended.
        """
        if self._failure is not None:
            raise self._failure

    def check_open(self) -> None:
        """Raise an error if no requests can be sent.

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
        """Send as many bytes as the socket accepts now."""
        self._pending += self.channel.outgoing()
        while self._pending and not self.peer_closed:
            try:
                sent_size = self.socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:  # the peer has hung up; its last answer is still unread
                break
            del self._pending[:sent_size]
        self._pending.clear()

    def listen(self) -> None:
        """Receive available bytes. At the end of the stream, the caller must call :meth:`conclude`."""
        try:
            data = self.socket.recv(_PIECE)
        except (BlockingIOError, ConnectionResetError):  # the kernel reports a reset once if the peer left bytes unread
            return
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self.peer_closed = True

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
        """Whether the peer has hung up without a last answer, and :meth:`conclude` has not recorded the reason yet."""
        return self.peer_closed and not self.channel.done and self._failure is None

    def conclude(self, sandbox_error: SandboxGone | None) -> None:
        """Record the reason why the peer has hung up without a last answer.

        Args:
            sandbox_error: the error if the sandbox has ended; None if it runs, so that a command inside must have
                killed the peer.
        """
        if not self.inconclusive:
            return
        if sandbox_error is None:
            self.channel.hung_up()
        else:
            self._failure = sandbox_error

    def reason(self) -> SandboxGone | None:
        """Return the error if the sandbox has ended, or None if it runs; may block briefly."""
        try:
            self.core.check_alive()
        except SandboxGone as error:
            return error
        return None

    def hang_up(self) -> None:
        """Shut down the socket, so that callers that wait on it wake up."""
        if self._failure is None and not self.channel.done:
            self._failure = self._closed_error()
        with contextlib.suppress(OSError):  # already disconnected
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.hang_up()
        self.socket.close()


class Queue:
    """Computes the deadlines of callers that share a shell, which runs one script at a time."""

    def __init__(self) -> None:
        self._script_count = 0
        self._last_deadline = 0.0

    def join(self, timeout: float | None) -> float | None:
        """Add a script to the queue.

        Args:
            timeout: wall-clock seconds that the script may take; None: no limit.

        Returns:
            The time.monotonic() at which its result must have arrived, or None without a limit.
        """
        start_time = max(time.monotonic(), self._last_deadline if self._script_count else 0.0)
        self._last_deadline = math.inf if timeout is None else start_time + timeout + GRACE
        self._script_count += 1
        return None if math.isinf(self._last_deadline) else self._last_deadline

    def leave(self) -> None:
        """Remove a script that has ended, or whose caller was interrupted."""
        self._script_count -= 1


def has_room(channel: ProcessChannel, deadline: float | None = None) -> bool:
    """Return whether more unread output may be received.

    Args:
        channel: channel of the process.
        deadline: time.monotonic() at which the process times out. From then on the answer is True, because a blocked
            writer can only learn of the timeout from the result, which follows all output.
    """
    return len(channel.events) < MOST_UNREAD or (deadline is not None and time.monotonic() >= deadline)


def as_bytes(data: bytes | str) -> bytes:
    """Encode text as UTF-8; return bytes unchanged."""
    return encoded(data) if isinstance(data, str) else bytes(data)


def still_runs(channel: ProcessChannel, timeout: float | None) -> WaitTimeout:
    """Return the error for a process that is still running after the timeout of a wait."""
    return WaitTimeout(f"process {channel.id} still runs after {timeout} s", hint="wait longer, or kill it")
