"""The controller's half of the protocol, without any I/O: both colours of the sandbox drive these calls.

A *call* is one job on a socket of its own. ``outgoing()`` yields what to send; ``feed()`` takes what was received until
``done``; then ``result()`` gives the value or raises. ``hung_up()`` is for a peer that closed before it answered.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone
from minisandbox.launch import frames
from minisandbox.types import ExecResult, Outcome, Usage

_CHUNK = 1 << 20
_LONGEST_TIMEOUT = 1e8
_DROPPED_LINE = 80
"""Bytes that the line about missing output may add."""


class Call:
    """What every call shares: framing, the error answer, the end."""

    def __init__(self, request: frames.Header, payload: bytes = b"", *, max_answer: int = 0) -> None:
        self._request = request
        self._payload = payload
        self._decoder = frames.Decoder(max_answer)
        self._error: frames.Header | None = None
        self.done = False

    def outgoing(self) -> Iterator[bytes]:
        """What to send, in pieces."""
        yield frames.encode(self._request, self._payload)

    def feed(self, data: bytes) -> None:
        """Take received bytes.

        Raises:
            SandboxGone: they are not our protocol; the sandbox is not to be trusted further.
        """
        try:
            for header, payload in self._decoder.feed(data):
                self._take(header, payload)
        except (AssertionError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise SandboxGone(f"the sandbox answered nonsense: {error!r}") from error

    def _take(self, header: frames.Header, payload: bytes) -> None:
        if header["event"] == "error":
            self._error = header
            self.done = True
        else:
            self._answer(header, payload)

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        raise NotImplementedError

    def _raise_error(self) -> None:
        if self._error is None:
            return
        number = self._error.get("errno")
        path, operation = str(self._error.get("path")), self._error.get("operation")
        what = f"cannot enter {path}" if operation == "exec" else f"cannot {operation} {path}"
        raise FileAccessError(
            f"{what}: {self._error.get('message')}", path=path, errno=number if isinstance(number, int) else None
        )


class ExecCall(Call):
    """Run a command.

    Args:
        command: text for ``bash -c``, or an argument list.
        env: the whole environment.
        cwd: absolute directory inside.
        timeout: wall seconds, or None.
        stdin: bytes for its standard input, or None for an empty one.
        output: bytes kept per stream.

    Raises:
        InvalidValue: an argument cannot be used.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        timeout: float | None,
        stdin: bytes | None,
        output: int,
    ) -> None:
        self.command = command if isinstance(command, str) else tuple(command)
        request: frames.Header = {
            "verb": "exec",
            "env": list(env.items()),
            "cwd": cwd,
            "timeout": timeout,
            "stdin": stdin is not None,
            "output": output,
        }
        request["script" if isinstance(command, str) else "argv"] = self.command
        _check_command(self.command, env, timeout)
        super().__init__(request, stdin or b"", max_answer=2 * (output + _DROPPED_LINE))
        self._result: ExecResult | None = None

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        self._result = _exec_result(self.command, header, payload)
        self.done = True

    def hung_up(self) -> None:
        """The command's supervisor was killed from inside: all that is known is that it is over."""
        self._result = ExecResult(self.command, Outcome.SIGNALED, None, int(signal.SIGKILL), b"", b"")
        self.done = True

    def result(self) -> ExecResult:
        """The command's fate.

        Raises:
            FileAccessError: its working directory cannot be entered.
        """
        self._raise_error()
        assert self._result is not None
        return self._result


def _check_command(command: str | tuple[str, ...], env: Mapping[str, str], timeout: float | None) -> None:
    parts = (command,) if isinstance(command, str) else command
    if not parts or not all(isinstance(part, str) for part in parts) or not parts[0]:
        raise InvalidValue(f"command {command!r} is empty or not text", hint="give a string or a list of strings")
    if any("\0" in part for part in (*parts, *env.keys(), *env.values())):
        raise InvalidValue("a NUL character in a command or its environment", hint="pass such data by stdin or a file")
    if any(not name or "=" in name for name in env):
        raise InvalidValue("an environment variable's name is empty or contains '='")
    if timeout is not None and not 0 < timeout <= _LONGEST_TIMEOUT:
        hint = f"give at most {_LONGEST_TIMEOUT:.0f}, or None for no limit"
        raise InvalidValue(f"timeout {timeout!r} is not a positive number of seconds", hint=hint)


def _exec_result(command: str | tuple[str, ...], header: frames.Header, payload: bytes) -> ExecResult:
    status, usage, dropped, cut = header["status"], header["usage"], header["dropped"], header["stdout_size"]
    duration, left = header["duration"], header["left_running"]
    assert isinstance(status, int)
    assert isinstance(usage, list)
    assert isinstance(dropped, list)
    assert isinstance(cut, int)
    assert isinstance(duration, float)
    assert isinstance(left, int)
    if header["timed_out"]:
        outcome, code, number = Outcome.TIMEOUT, None, None
    elif os.WIFSIGNALED(status):
        outcome, code, number = Outcome.SIGNALED, None, os.WTERMSIG(status)
    else:
        outcome, code, number = Outcome.EXITED, os.WEXITSTATUS(status), None
    return ExecResult(
        command,
        outcome,
        code,
        number,
        payload[:cut],
        payload[cut:],
        dropped[0],
        dropped[1],
        duration,
        Usage(*usage),
        left,
    )


class ReadCall(Call):
    """Read a regular file into a stream.

    Args:
        path: path inside; relative ones are below ``cwd``.
        cwd: absolute directory inside.
        limit: most bytes to take, or None.
        sink: where the bytes go.
    """

    def __init__(self, path: str, *, cwd: str, limit: int | None, sink: BinaryIO) -> None:
        super().__init__({"verb": "read", "path": path, "cwd": cwd, "limit": limit}, max_answer=_CHUNK)
        self._sink = sink

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        if header["event"] == "data":
            self._sink.write(payload)
        else:
            self.done = True

    def result(self) -> None:
        """Return once everything was read.

        Raises:
            FileAccessError: there is no such file, it is not a regular one, or it is larger than the limit.
        """
        self._raise_error()


class WriteCall(Call):
    """Write a regular file from a stream.

    Args:
        path: path inside; missing parent directories are made.
        cwd: absolute directory inside.
        mode: permission bits, or None to leave them (0644 for a new file).
        source: pieces of the content.
    """

    def __init__(self, path: str, *, cwd: str, mode: int | None, source: Iterable[bytes]) -> None:
        super().__init__({"verb": "write", "path": path, "cwd": cwd, "mode": mode})
        self._source = source

    def outgoing(self) -> Iterator[bytes]:
        """The request, the content in pieces, and its end."""
        yield from super().outgoing()
        for piece in self._source:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK):
                yield frames.encode({"event": "data"}, bytes(view[start : start + _CHUNK]))
        yield frames.encode({"event": "end"})

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - any other answer is "done"
        self.done = True

    def result(self) -> None:
        """Return once everything was written.

        Raises:
            FileAccessError: the path cannot be written, or the sandbox's disk limit is reached.
        """
        self._raise_error()
