"""The controller's side of the protocol of processes and shells, without I/O.

A *channel* uses one job's connection for as long as its process or shell lives. Its methods queue requests;
``outgoing()`` returns the bytes to send now; ``feed()`` accepts received bytes. The driver of a channel sends
``start()`` first, then ``outgoing()`` after every request and every ``feed()``. At the end of the stream, including a
ConnectionResetError, it calls ``hung_up()``. On a BrokenPipeError it drops the unsent bytes and keeps receiving,
because the peer's last answer may still arrive.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.launch.jobs import frames
from minisandbox.launch.jobs.exec import Capture
from minisandbox.launch.jobs.frames import STDIN_CREDIT
from minisandbox.sandbox.protocol import wire
from minisandbox.sandbox.validation import check_type
from minisandbox.types import ExecResult, Output, ShellResult, Terminal

Lifetime = Literal["handle", "sandbox"]

_PIECE = 1 << 16
_MAX_OUTPUT_FRAME = 1 << 17
_STREAMS = ("stdout", "stderr")
_END_OF_FILE = b"\x04"


class _Channel:
    """Base class of the channels: decodes frames, queues requests, and records an error response."""

    done: bool

    def __init__(self, max_answer: int) -> None:
        self._max_answer = max_answer
        self._decoder = frames.Decoder(max_answer)
        self._queue = bytearray()
        self._error: frames.Header | None = None

    def outgoing(self) -> bytes:
        """Remove the queued bytes from the channel and return them for sending."""
        data = bytes(self._queue)
        self._queue.clear()
        return data

    def feed(self, data: bytes) -> None:
        """Process received bytes.

        Raises:
            SandboxGone: the bytes violate the protocol, so the sandbox cannot be trusted.
        """
        try:
            for header, payload in self._decoder.feed(data):
                if header["event"] == "error":
                    self._error, self.done = header, True
                else:
                    self._take(header, payload)
        except wire.NONSENSE as error:
            raise wire.malformed("a started process or shell", error) from error

    def _take(self, header: frames.Header, payload: bytes) -> None:
        raise NotImplementedError

    def _queue_request(self, header: frames.Header, payload: bytes = b"") -> None:
        self._queue += frames.encode(header, payload)


class ProcessChannel(_Channel):
    """One started or attached process on one connection.

    Args:
        command: text for ``bash -c``, or an argument list.
        id: id of the process, unique in the sandbox.
        env: the complete environment (:func:`.wire.environment_for`).
        cwd: absolute directory inside.
        timeout: wall-clock seconds, or None.
        user: name or uid, or None for the sandbox's default user.
        pty: size of a terminal to run it on, or None for pipes.
        lifetime: the process is killed with its ``handle`` or its ``sandbox``. For ``sandbox``, send a listening socket
            (SCM_RIGHTS) with the first byte of ``start()``, so that other handles can attach to the process.
        output: bytes kept per stream.

    Attributes:
        id: id of the process, unique in the sandbox.
        command: the command as given; for an attached process, known once ``started``.
        pid: pid inside the sandbox; 0 before ``started``.
        started: whether the process runs or has run.
        done: whether nothing more will arrive, because the process has exited, or could not be started or attached to.
        events: pieces of output in order, then the result; the consumer removes them.
        result: the result once the process has exited, or None.
        remaining: seconds that remained of the timeout when ``started`` was set, or None without a timeout.

    Raises:
        InvalidValue: an argument is invalid.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        id: str,  # noqa: A002 - the contract's word
        env: Mapping[str, str],
        cwd: str,
        timeout: float | None,
        user: str | int | None,
        pty: Terminal | None,
        lifetime: Lifetime,
        output: int,
    ) -> None:
        if lifetime not in ("handle", "sandbox"):
            raise InvalidValue(f"lifetime {lifetime!r} is not known", hint="give 'handle' or 'sandbox'")
        if pty is not None:
            check_type("pty", pty, Terminal, "a Terminal, or None for pipes")
        super().__init__(_MAX_OUTPUT_FRAME)
        request = wire.command_request("start", command, env=env, cwd=cwd, timeout=timeout, user=user, output=output)
        size = None if pty is None else [pty.rows, pty.columns]
        argv = command if isinstance(command, str) else tuple(command)
        self._prepare(id, argv, output, {**request, "pty": size, "lifetime": lifetime, "id": id})
        self._terminal = pty is not None

    def _prepare(
        self, identifier: str, command: str | tuple[str, ...], output: int, request: frames.Header | None
    ) -> None:
        self._request = request
        self._needs_acknowledgement = request is None or request["lifetime"] == "sandbox"
        self.id = identifier
        self.command = command
        self.pid = 0
        self.started = False
        self.done = False
        self.events: deque[Output | ExecResult] = deque()
        self.result: ExecResult | None = None
        self.remaining: float | None = None
        self._terminal = False
        self._captures = (Capture(output), Capture(output))
        self._dropped = [0, 0]
        self._unsent = bytearray()
        self._credit = STDIN_CREDIT
        self._is_closing = self._close_sent = False

    @classmethod
    def attach(cls, id: str, *, output: int) -> ProcessChannel:  # noqa: A002 - the contract's word
        """Create the channel that attaches to a process with lifetime ``sandbox``, through its listening socket.

        Args:
            id: id of the process.
            output: bytes kept per stream.
        """
        channel = cls.__new__(cls)
        _Channel.__init__(channel, _MAX_OUTPUT_FRAME)
        channel._prepare(id, "", output, None)
        channel._credit = 0  # until the supervisor reports how much input is pending
        return channel

    def start(self) -> bytes:
        """Return the first request on a new connection; feed answers until ``started`` or ``done`` is set."""
        return frames.encode({"verb": "attach"} if self._request is None else self._request)

    def check(self) -> None:
        """Raise the error if the process could not be started or attached to.

        Raises:
            FileAccessError: its working directory cannot be entered.
            InvalidValue: its user does not exist or is not available in this sandbox, or another handle holds the
                process.
            NotFound: the process exited before this handle could attach.
        """
        if self._error is not None and self._request is None:
            raise InvalidValue(
                f"process {self.id} is held by another handle", reason="a process has one holder at a time",
                hint="close the other handle first",
            )  # fmt: skip
        if self._error is not None:
            wire.raise_error(self._error)
        if self.done and self.result is None:
            raise NotFound(f"process {self.id} has ended, and its result was taken")

    def acknowledge(self) -> None:
        """Queue an acknowledgement of the result of a process with lifetime ``sandbox``.

        The supervisor keeps the result for the next handle that attaches until it receives this acknowledgement.
        """
        if self._needs_acknowledgement and self.result is not None:
            self._needs_acknowledgement = False
            self._queue_request({"verb": "seen"})

    # --- requests ---

    @property
    def unsent(self) -> int:
        """Bytes of standard input that wait until the process reads more. A writer waits until this is 0."""
        return 0 if self.done else len(self._unsent)

    def write(self, data: bytes) -> None:
        """Queue standard input.

        Raises:
            InvalidValue: standard input was closed.
        """
        if self._is_closing:
            raise InvalidValue(f"standard input of process {self.id} was closed")
        self._unsent += data
        self._spend()

    def close_stdin(self) -> None:
        """Queue the end of standard input (on a pty: ^D); calling it again does nothing."""
        if self._is_closing:
            return
        if self._terminal:  # a terminal is not closed: VEOF ends the input (termios(3))
            self.write(_END_OF_FILE)
            return
        self._is_closing = True
        self._spend()

    def signal(self, number: int) -> None:
        """Queue a signal to the process itself.

        Raises:
            InvalidValue: there is no such signal.
        """
        if number not in signal.valid_signals():
            raise InvalidValue(f"signal {number!r} does not exist", hint="give a number, such as signal.SIGINT")
        self._queue_request({"verb": "signal", "number": int(number)})

    def kill(self) -> None:
        """Queue a request to kill the process and all its descendants."""
        self._queue_request({"verb": "kill"})

    def resize(self, terminal: Terminal) -> None:
        """Queue a new size of the terminal.

        Raises:
            InvalidValue: the process has no terminal.
        """
        if not self._terminal:
            raise InvalidValue(f"process {self.id} has no terminal", hint="start it with pty=Terminal(rows, columns)")
        self._queue_request({"verb": "resize", "size": [terminal.rows, terminal.columns]})

    def _spend(self) -> None:
        """Move standard input to the send queue, as far as the credit allows."""
        while self._unsent and self._credit:
            chunk = bytes(self._unsent[: min(_PIECE, self._credit)])
            del self._unsent[: len(chunk)]
            self._credit -= len(chunk)
            self._queue_request({"verb": "stdin"}, chunk)
        if self._is_closing and not self._unsent and not self._close_sent:
            self._close_sent = True
            self._queue_request({"verb": "close_stdin"})

    # --- answers ---

    def _take(self, header: frames.Header, payload: bytes) -> None:
        event = header["event"]
        if event == "output":
            stream = header["stream"]
            assert stream in (0, 1)
            self._captures[int(stream)].add(payload)
            self.events.append(Output(_STREAMS[int(stream)], payload))
        elif event == "credit":
            self._add_credit(header["size"])
        elif event == "started":
            self._begin(header)
        elif event == "exit" and not self.done:
            self._finish(wire.exec_result(self.command, header, b""), header)

    def _add_credit(self, size: object) -> None:
        assert isinstance(size, int)
        assert 0 <= size <= STDIN_CREDIT
        self._credit = min(self._credit + size, STDIN_CREDIT)
        self._spend()

    def _begin(self, header: frames.Header) -> None:
        pid, command, remaining = header["pid"], header.get("command"), header.get("left")
        assert isinstance(pid, int)
        assert remaining is None or isinstance(remaining, int | float)
        self.pid, self.started, self.remaining = pid, True, remaining
        self._count_dropped(header)
        if self._request is None:
            self.command = str(command) if isinstance(command, str) else tuple(map(str, wire.as_list(command)))
            self._terminal = header["pty"] is True
            self._is_closing = self._close_sent = header["closed"] is True
            self._add_credit(header["credit"])

    def _count_dropped(self, header: frames.Header) -> None:
        for stream, count in enumerate(wire.as_list(header["dropped"])):
            assert isinstance(count, int)
            self._dropped[stream] += count

    def _finish(self, result: ExecResult, header: frames.Header | None) -> None:
        if header is not None:
            self._count_dropped(header)
        outputs = self._captures
        self.result = ExecResult(
            result.command, result.outcome, result.exit_code, result.signal, outputs[0].result(), outputs[1].result(),
            self._dropped[0] + outputs[0].dropped, self._dropped[1] + outputs[1].dropped,
            result.duration, result.usage, result.left_running, result.limits_hit,
        )  # fmt: skip
        self.events.append(self.result)
        self.done = True

    def hung_up(self) -> None:
        """Handle the end of the stream. If no result was reported, a command inside has killed the supervisor."""
        if self._request is None and not self.started:
            self.done = True
        elif not self.done:
            self._finish(wire.killed(self.command), None)


class ShellChannel(_Channel):
    """One stateful bash.

    Args:
        env: the complete environment (:func:`.wire.environment_for`).
        cwd: absolute directory inside.
        user: name or uid, or None for the sandbox's default user.
        output: bytes kept of the stdout and of the stderr of each run.

    Attributes:
        started: whether bash accepts scripts.
        done: whether nothing more will arrive on this connection; ``start()`` starts a new bash on a new connection,
            in the last reported directory.
        cwd: working directory of the next run, as last reported.

    Raises:
        InvalidValue: an argument is invalid.
    """

    def __init__(self, *, env: Mapping[str, str], cwd: str, user: str | int | None, output: int) -> None:
        super().__init__(2 * (output + wire.DROPPED_LINE))
        self._request = wire.command_request(
            "shell", ("bash",), env=env, cwd=cwd, timeout=None, user=user, output=output
        )
        self.cwd = PurePosixPath(cwd)
        self.started = self._has_run = False
        self.done = True
        self._number = 0
        self._running: dict[int, str] = {}
        self._results: dict[int, ShellResult] = {}

    def start(self) -> bytes:
        """Return the first request on a new connection; feed answers until ``started`` or ``done`` is set."""
        request = {**self._request, "cwd": str(self.cwd), "again": self._has_run}
        self._decoder = frames.Decoder(self._max_answer)
        self._queue.clear()
        self._error, self.done, self.started = None, False, False
        return frames.encode(request)

    def check(self) -> None:
        """Raise the error if bash could not be started.

        Raises:
            FileAccessError: the working directory cannot be entered, or there is no bash.
            InvalidValue: there is no such user, or the user is not available in this sandbox.
        """
        if self._error is not None:
            wire.raise_error(self._error)

    def run(self, script: str, *, timeout: float | None) -> int:
        """Queue a script; scripts run one after the other.

        Args:
            script: text for bash, of any number of lines.
            timeout: wall-clock seconds from the start of the script, or None.

        Returns:
            The number of this run.

        Raises:
            InvalidValue: an argument is invalid.
        """
        check_type("script", script, str, "a str for bash")
        wire.check_runnable(script or ":", {}, timeout)
        self._number += 1
        self._running[self._number] = script
        self._queue_request({"verb": "run", "run": self._number, "timeout": timeout}, wire.encoded(script))
        return self._number

    def interrupt(self, run: int) -> None:
        """Queue a request to kill a run, as a timeout does. Its status is SIGINT, unless it has already ended."""
        if run in self._running:
            self._queue_request({"verb": "interrupt", "run": run})

    def take(self, run: int) -> ShellResult | None:
        """Remove and return the result of a run; return None if the run has not ended."""
        return self._results.pop(run, None)

    def forget(self, run: int) -> None:
        """Drop the result of a run, because its caller has stopped waiting."""
        self._running.pop(run, None)
        self._results.pop(run, None)

    def _take(self, header: frames.Header, payload: bytes) -> None:
        self.cwd = _directory(header["cwd"])
        if header["event"] == "started":
            self.started = self._has_run = True
        elif header["event"] == "exit":
            run = header["run"]
            assert isinstance(run, int)
            script = self._running.pop(run, None)
            if script is not None:  # None if the caller has stopped waiting
                restarted = header["restarted"] is True
                self._end(run, wire.exec_result(script, header, payload), restarted=restarted)

    def _end(self, run: int, result: ExecResult, *, restarted: bool) -> None:
        self._results[run] = ShellResult(
            result.command, result.outcome, result.exit_code, result.signal, result.stdout_bytes, result.stderr_bytes,
            result.dropped_stdout, result.dropped_stderr, result.duration, result.usage, result.left_running,
            result.limits_hit, restarted, self.cwd,
        )  # fmt: skip

    def hung_up(self) -> None:
        """Handle the end of the stream: a command inside has killed bash, its supervisor and the current script."""
        self.done = True
        for run in sorted(self._running):
            self._end(run, wire.killed(self._running.pop(run)), restarted=True)


def _directory(path: object) -> PurePosixPath:
    assert isinstance(path, str)
    assert path.startswith("/")
    return PurePosixPath(path)
