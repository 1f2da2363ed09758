"""The controller's side of the protocol of single requests, without I/O; sync and async handles drive these calls.

A *call* is one job on a separate socket. ``outgoing()`` yields the bytes to send; ``feed()`` processes received bytes
until ``done``; then ``result()`` returns the value or raises. ``hung_up()`` handles a peer that closes before it has
answered.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeVar

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone
from minisandbox.launch.jobs import frames
from minisandbox.sandbox import validation
from minisandbox.types import LIMITS_HIT, ExecResult, Outcome, Usage

_PATIENCE = 300.0
_DEADLINE_GRACE = 60.0
"""Seconds after a command's timeout within which its result must arrive, even on a busy machine."""
DROPPED_LINE = 80
"""Maximum bytes of the line that reports dropped output."""
NONSENSE = (AssertionError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that decoding a malformed answer can raise."""
_ACCOUNT = ("HOME", "USER", "LOGNAME")
_LARGEST_ID = (1 << 32) - 2
_LONGEST_ESCAPE = 12
"""Maximum bytes of JSON for one character, which takes two escaped surrogates."""
_LARGEST_REQUEST = frames.MAX_HEADER - (64 << 10)
"""Maximum bytes of the checked fields of a request; the remaining bytes are for its other fields."""


class Call:
    """Base class of all calls: decodes frames, and handles an error response and the end of the stream.

    Attributes:
        done: whether the call was answered.
        patience: seconds without received data after which the sandbox counts as hanging; None: no limit.
    """

    patience: float | None = _PATIENCE

    def __init__(self, request: frames.Header, payload: bytes = b"", *, max_answer: int = 0) -> None:
        self._request = request
        self._payload = payload
        self._decoder = frames.Decoder(max_answer)
        self._error: frames.Header | None = None
        self.done = False

    def outgoing(self) -> Iterator[bytes]:
        """Yield the bytes to send, in pieces."""
        yield frames.encode(self._request, self._payload)

    def feed(self, data: bytes) -> None:
        """Process received bytes.

        Raises:
            SandboxGone: the bytes violate the protocol, so the sandbox cannot be trusted.
        """
        try:
            for header, payload in self._decoder.feed(data):
                self._take(header, payload)
        except NONSENSE as error:
            raise malformed(f"verb {self._request.get('verb')!r}", error) from error

    def hung_up(self) -> None:
        """Handle a peer that closed before it had answered, while the sandbox is running.

        Raises:
            SandboxGone: the result of the call is unknown; subclasses may return one instead.
        """
        raise SandboxGone("the sandbox did not answer a request", reason="its worker was killed from inside")

    def _take(self, header: frames.Header, payload: bytes) -> None:
        if header["event"] == "error":
            self._error = header
            self.done = True
        else:
            self._answer(header, payload)

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        raise NotImplementedError

    def _raise_error(self) -> None:
        if self._error is not None:
            raise_error(self._error)


def malformed(request: str, error: Exception) -> SandboxGone:
    """Return the error for an answer that breaks the protocol.

    Args:
        request: the request that was answered.
        error: exception that decoding the answer raised.
    """
    return SandboxGone(
        f"the sandbox's answer to {request} is malformed: {error!r}",
        reason="a command inside took over the process that answers, or it runs another version of MiniSandbox",
        hint="stop the sandbox and create another; report a bug if nothing hostile ran in it",
    )


T = TypeVar("T")
Operation = Generator[Call, None, T]
"""A generator that yields calls for its driver to run, and returns the value of the operation."""


def raise_error(error: frames.Header) -> None:
    """Raise the exception for an ``error`` answer.

    Raises:
        InvalidValue: the requested user is not available.
        FileAccessError: any other error.
    """
    number, message = error.get("errno"), error.get("message")
    path, operation = str(error.get("path")), error.get("operation")
    if operation == "user":
        raise _no_such_user(path, number)
    failure = f"cannot enter {path}" if operation == "exec" else f"cannot {operation} {path}"
    raise FileAccessError(f"{failure}: {message}", path=path, errno=number if isinstance(number, int) else None)


def _no_such_user(user: str, number: object) -> InvalidValue:
    if number == errno.ENOENT:
        return InvalidValue(
            f"user {user!r} does not exist", reason="/etc/passwd of the sandbox does not name it",
            hint="add it there, or give a uid",
        )  # fmt: skip
    if number == errno.ERANGE:
        return InvalidValue(
            f"user {user!r} cannot be had", reason="its uid or a gid of its is not one of the sandbox's",
            hint="/proc/self/uid_map in the sandbox lists its uids, /proc/self/gid_map its gids",
        )  # fmt: skip
    if number == errno.E2BIG:
        return InvalidValue(
            f"user {user!r} is in more than 63 groups", reason="more than that cannot be had in a sandbox",
            hint="take it out of some of them, in /etc/group of the sandbox",
        )  # fmt: skip
    if number == errno.EACCES:
        return InvalidValue(
            f"user {user!r} would be root, with its capabilities",
            reason="/etc/passwd of the sandbox gives that name uid 0; code inside may have changed it",
            hint='give user="root" where root is meant, or the uid of the user',
        )
    return InvalidValue(
        f"user {user!r} cannot be had", reason="this sandbox has one id only, which its root is",
        hint="install newuidmap and give yourself a range in /etc/subuid and /etc/subgid; see 'minisandbox doctor'",
    )  # fmt: skip


def environment_for(
    base: Mapping[str, str], env: Mapping[str, str] | None, user: str | int | None = None
) -> dict[str, str]:
    """Return the complete environment of a command.

    Args:
        base: variables of every command in the sandbox.
        env: variables of this command, which override them.
        user: user of the command, or None. The worker then sets HOME, USER and LOGNAME for that user, unless ``env``
            sets them.

    Raises:
        InvalidValue: ``env`` is not a mapping of strings to strings.
    """
    validation.check_texts("env", env)
    inherited = base if user is None else {name: value for name, value in base.items() if name not in _ACCOUNT}
    return {**inherited, **(env or {})}


def command_request(
    verb: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    timeout: float | None,
    user: str | int | None,
    output: int,
) -> frames.Header:
    """Return the fields that the requests ``exec``, ``start`` and ``shell`` share.

    Raises:
        InvalidValue: an argument is invalid.
    """
    validation.check_command(command)
    argv = command if isinstance(command, str) else tuple(command)
    check_runnable(argv, env, timeout)
    _check_user(user)
    request: frames.Header = {
        "verb": verb,
        "script" if isinstance(argv, str) else "argv": argv,
        "env": list(env.items()),
        "cwd": cwd,
        "timeout": timeout,
        "user": user,
        "output": output,
    }
    parts = (argv,) if isinstance(argv, str) else argv
    if sum(len(text) for text in (*parts, *env, *env.values())) * _LONGEST_ESCAPE > _LARGEST_REQUEST:
        _check_size(request)
    return request


def _check_size(request: frames.Header) -> None:
    """Reject a request that is too large. The worker would hang up, which would look like a killed command."""
    size = len(frames.encode(request))
    if size > _LARGEST_REQUEST:
        raise InvalidValue(
            f"a command and its environment of {size} bytes, as they are sent",
            reason=f"a request has {_LARGEST_REQUEST} at most, with escapes counted",
            hint="write it to a file inside (files.write_text), and run that; give data by stdin",
        )


class ExecCall(Call):
    """Run a command.

    Args:
        command: text for ``bash -c``, or an argument list.
        env: the complete environment (:func:`environment_for`).
        cwd: absolute directory inside.
        timeout: wall-clock seconds, or None.
        stdin: its standard input, or None for an empty one.
        output: bytes kept per stream.
        user: name or uid to run it as, or None for the sandbox's default user.

    Raises:
        InvalidValue: an argument is invalid.
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
        user: str | int | None = None,
    ) -> None:
        request = command_request("exec", command, env=env, cwd=cwd, timeout=timeout, user=user, output=output)
        request["stdin"] = stdin is not None
        super().__init__(request, stdin or b"", max_answer=2 * (output + DROPPED_LINE))
        self.patience = None if timeout is None else timeout + _DEADLINE_GRACE
        self.command = command if isinstance(command, str) else tuple(command)
        self._result: ExecResult | None = None

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        self._result = exec_result(self.command, header, payload)
        self.done = True

    def hung_up(self) -> None:
        """Record a result for a command whose supervisor was killed from inside the sandbox."""
        self._result = killed(self.command)
        self.done = True

    def result(self) -> ExecResult:
        """Return the command's result.

        Raises:
            FileAccessError: its working directory cannot be entered.
            InvalidValue: its user is not available.
        """
        self._raise_error()
        assert self._result is not None
        return self._result


def check_runnable(command: str | tuple[str, ...], env: Mapping[str, str], timeout: float | None) -> None:
    """Check the values of a command, its environment and its timeout.

    Raises:
        InvalidValue: an argument is invalid.
    """
    parts = (command,) if isinstance(command, str) else command
    if not parts or not parts[0]:
        raise InvalidValue(f"command {command!r} is empty", hint="give a string or a list of strings")
    strings = (*parts, *env.keys(), *env.values())
    joined = "".join(strings)
    if not joined.isascii():
        for string in strings:
            encoded(string)
    if "\0" in joined:
        raise InvalidValue("a NUL character in a command or its environment", hint="pass such data by stdin or a file")
    if any(not name or "=" in name for name in env):
        raise InvalidValue("an environment variable's name is empty or contains '='")
    validation.check_timeout(timeout)


def encoded(text: str) -> bytes:
    """Encode text as UTF-8, with surrogate escapes (PEP 383).

    Raises:
        InvalidValue: the text contains an unpaired surrogate that encodes no byte, as JSON can.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"half of a surrogate pair at character {error.start} of a text",
            reason="it comes from JSON, or from text that was cut",
            hint="leave it out, or give bytes where they can be given",
        ) from None


def _check_user(user: object) -> None:
    if user is None:
        return
    if isinstance(user, str) and user and not set(user.replace(":", "", 1)) & set(":\n\0"):
        return
    if type(user) is not int or not 0 <= user <= _LARGEST_ID:  # True is an int too
        raise InvalidValue(f"user {user!r} is neither a name nor a uid", hint="give a name of /etc/passwd, or a uid")


def as_list(value: object) -> list[object]:
    """Check that a value of an answer is a list."""
    assert isinstance(value, list)
    return value


def killed(command: str | tuple[str, ...]) -> ExecResult:
    """Return the result of a command whose supervisor was killed from inside the sandbox, with SIGKILL as status."""
    return ExecResult(command, Outcome.SIGNALED, None, int(signal.SIGKILL), b"", b"")


def exec_result(command: str | tuple[str, ...], header: frames.Header, payload: bytes) -> ExecResult:
    """Decode an ``exit`` answer."""
    status, usage, dropped = header["status"], header["usage"], header["dropped"]
    duration, left_running, hits = header["duration"], header["left_running"], header.get("hit", [])
    stdout_size = frames.integer(header, "stdout_size")
    assert isinstance(status, int)
    assert isinstance(usage, list)
    assert all(isinstance(number, int | float) for number in usage)
    assert isinstance(dropped, list)
    assert all(isinstance(count, int) for count in dropped)
    assert isinstance(duration, float)
    assert isinstance(left_running, int)
    assert isinstance(hits, list)
    limits_hit = [name for name in LIMITS_HIT if name in hits or (name == "output" and any(dropped))]
    if header["timed_out"]:
        outcome, exit_code, signal_number = Outcome.TIMEOUT, None, None
    elif os.WIFSIGNALED(status):
        outcome, exit_code, signal_number = Outcome.SIGNALED, None, os.WTERMSIG(status)
    else:
        outcome, exit_code, signal_number = Outcome.EXITED, os.WEXITSTATUS(status), None
    return ExecResult(
        command, outcome, exit_code, signal_number, payload[:stdout_size], payload[stdout_size:], dropped[0],
        dropped[1], duration, Usage(*usage), left_running, tuple(limits_hit),
    )  # fmt: skip
