"""Start a program: by posix_spawn(3) as the sandbox's own user, by fork(2) as another user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NoReturn, Self

from minisandbox.launch.kernel import syscalls as sc

from . import users
from .frames import Header
from .users import Account

_ARGUMENT_MAX = 120_000
"""Length limit of a script passed as an argument: MAX_ARG_STRLEN is 128 KiB (execve(2)). Longer scripts use a file."""
_SCRIPT = 3
_SCORE_ABOVE_OURS, _HIGHEST_SCORE = 500, 1000
"""OOM score adjustments (proc(5)): when memory runs out, the kernel kills commands before their workers."""
_EXECVE_PAUSES = (0.0, *(0.00005 * 2**n for n in range(10)))
"""Seconds between attempts while a child is in execve(2), 0.05 s in total."""
_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT)
_CANNOT_ENTER, _CANNOT_START = b"d", b"x"


class SpawnError(OSError):
    """A command's user does not exist, or its working directory cannot be entered.

    Attributes:
        operation: ``user`` or ``exec``.
        path: the user, or the directory that cannot be entered.
    """

    def __init__(self, error: OSError, operation: str, path: object) -> None:
        super().__init__(error.errno, error.strerror)
        self.operation = operation
        self.path = path


class Pipes:
    """Closes descriptors at the end of a ``with`` block unless they are kept."""

    def __init__(self) -> None:
        self._descriptors: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def make(self) -> tuple[int, int]:
        """Create a pipe; return its read end and its write end."""
        pipe_ends = os.pipe2(os.O_CLOEXEC)
        self._descriptors.update(pipe_ends)
        return pipe_ends

    def null(self) -> int:
        """Open an empty input."""
        return self.add(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def add(self, descriptor: int) -> int:
        """Close this descriptor too at the end of the block; return it."""
        self._descriptors.add(descriptor)
        return descriptor

    def keep(self, *descriptors: int) -> None:
        """Keep these descriptors open, and make them non-blocking."""
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._descriptors.discard(descriptor)


@dataclass(slots=True)
class Stdio:
    """The descriptors of a new process.

    Attributes:
        inherited: (descriptor in this process, number in the new process).
        terminal: path of a terminal that becomes its controlling terminal and standard descriptors, or "".
    """

    inherited: list[tuple[int, int]] = field(default_factory=list)
    terminal: str = ""


def spawn(request: Header, stdio: Stdio) -> int:
    """Start a request's program in a new session; return its pid.

    If the program cannot be executed, start a shell that reports the error and exits with 127 or 126.

    Args:
        request: ``argv`` or ``script``, ``env`` (pairs), ``cwd``, ``user`` (name, uid or null).
        stdio: descriptors of the new process.

    Raises:
        SpawnError: there is no such user or directory.
        OSError: no process could be started, for example at the process limit.
    """
    environment = _environment(request)
    account = _account(request.get("user"), environment)
    pid = _start(request, stdio, environment, account)
    _raise_score(pid)
    return pid


def start_nothing(request: Header, stdio: Stdio) -> int:
    """Run the code of :func:`spawn` for a program that does not exist, without an error message; return 0."""
    environment = _environment(request)
    with _arguments(request, stdio, "/proc") as arguments, _inside("/"), contextlib.suppress(OSError):
        _spawn(arguments, ["/proc", *_candidates(arguments[0], "/proc")], environment, stdio)
    _own_score()
    return 0


def _environment(request: Header) -> dict[str, str]:
    pairs = request["env"]
    assert isinstance(pairs, list)
    return {str(name): str(value) for name, value in pairs}


def _raise_score(pid: int) -> None:
    """Raise a new command's OOM score above this worker's, once the command is dumpable.

    The worker is not dumpable, and neither is its child before execve(2) completes: the host's root owns the /proc
    files of both. On a preemptive kernel, vfork(2) returns before that point, and the open fails with EACCES. The open
    also fails for a child that has exited, and for a child whose user may execute but not read its program.
    """
    score = b"%d" % min(_own_score() + _SCORE_ABOVE_OURS, _HIGHEST_SCORE)
    for pause in _EXECVE_PAUSES:
        try:
            descriptor = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        except PermissionError:
            if _has_ended(pid):
                return
            time.sleep(pause)
        except OSError:
            return
        else:
            with contextlib.suppress(OSError):  # the child has just exited
                os.write(descriptor, score)
            os.close(descriptor)
            return


def _has_ended(pid: int) -> bool:
    """Return whether a child has exited, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@cache
def _own_score() -> int:
    """Return this worker's OOM score adjustment, which never changes. In a Kubernetes pod it may not be 0."""
    with open("/proc/self/oom_score_adj", "rb", buffering=0) as score:
        return int(score.read())


def _start(request: Header, stdio: Stdio, environment: dict[str, str], account: Account | None) -> int:
    cwd = str(request["cwd"])
    with _arguments(request, stdio, environment.get("PATH", os.defpath)) as arguments:
        if account is not None:
            for descriptor, _ in stdio.inherited:
                account.chown_pipe(descriptor)
            if stdio.terminal:
                os.chown(stdio.terminal, account.uid, -1)
            return _or_complain(
                arguments, environment, lambda argv, paths: _fork(account, cwd, argv, paths, environment, stdio)
            )
        with _inside(cwd):
            return _or_complain(arguments, environment, lambda argv, paths: _spawn(argv, paths, environment, stdio))


def _account(user: object, environment: dict[str, str]) -> Account | None:
    """Return the account to switch to, or None if the command runs as the worker's own user."""
    if not isinstance(user, str | int):
        return None
    try:
        account = users.find(user)
    except OSError as error:
        raise SpawnError(error, "user", user) from error
    account.complete(environment)
    return None if account.is_default else account


@contextlib.contextmanager
def _inside(directory: str) -> Iterator[None]:
    try:
        os.chdir(directory)
    except OSError as error:
        raise SpawnError(error, "exec", directory) from error
    try:
        yield
    finally:
        os.chdir("/")


@contextlib.contextmanager
def _arguments(request: Header, stdio: Stdio, search_path: str) -> Iterator[list[str]]:
    """Yield the argument list. A script too long for an argument is held in a file until the program has started."""
    script, argv = request.get("script"), request.get("argv")
    if not isinstance(script, str):
        assert isinstance(argv, list)
        yield [str(part) for part in argv]
        return
    shell = _shell(search_path)
    if len(script) <= _ARGUMENT_MAX // 4 or len(os.fsencode(script)) <= _ARGUMENT_MAX:
        yield [shell, "-c", script]
    else:
        with sc.closing(os.memfd_create("script")) as descriptor:
            with open(os.dup(descriptor), "wb") as file:
                file.write(os.fsencode(script))
            os.lseek(descriptor, 0, os.SEEK_SET)
            stdio.inherited.append((descriptor, _SCRIPT))
            yield [shell, f"/dev/fd/{_SCRIPT}"]


def _shell(search_path: str) -> str:
    """Return the shell of scripts: bash, or sh if the image has no bash."""
    return "bash" if any(map(os.path.exists, _candidates("bash", search_path))) else "sh"


def _or_complain(
    arguments: list[str], environment: dict[str, str], start: Callable[[list[str], list[str]], int]
) -> int:
    """Start a program or, if it cannot be executed, a shell that reports why."""
    try:
        return start(arguments, _candidates(arguments[0], environment.get("PATH", os.defpath)))
    except SpawnError:
        raise
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise
        code, message = (127, "not found") if error.errno == errno.ENOENT else (126, str(error.strerror))
    command = ["sh", "-c", 'printf "%s: %s\\n" "$1" "$2" >&2; exit "$3"', "sh", arguments[0], message, str(code)]
    return start(command, ["/bin/sh"])


def _candidates(program: str, search_path: str) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(directory or ".", program) for directory in search_path.split(":")]


def _first_that_starts(paths: list[str], start: Callable[[str], int]) -> int:
    """Start the first program as execvp(3) does: skip missing files, remember other failures, stop at EAGAIN."""
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in paths:
        try:
            os.stat(path)  # much cheaper than a failed start
            return start(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise
            failure = error
    raise failure


def _spawn(arguments: list[str], paths: list[str], environment: dict[str, str], stdio: Stdio) -> int:
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    if stdio.terminal:  # a session leader's first terminal becomes its controlling terminal (tty_ioctl(4))
        actions.append((os.POSIX_SPAWN_OPEN, 0, stdio.terminal, os.O_RDWR, 0))
        actions += [(os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)]
    actions += [(os.POSIX_SPAWN_DUP2, descriptor, number) for descriptor, number in stdio.inherited]

    def start(path: str) -> int:
        return os.posix_spawn(
            path, arguments, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
        )

    return _first_that_starts(paths, start)


def _fork(
    account: Account, cwd: str, arguments: list[str], paths: list[str], environment: dict[str, str], stdio: Stdio
) -> int:
    """Start a program as another user.

    posix_spawn(3) cannot change the user, and the lookups of the program and its directory must be that user's.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with sc.closing(reader):
        with sc.closing(writer):
            pid = os.fork()
            if pid == 0:
                errors = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 4)
                _be_child(account, cwd, arguments, paths, environment, stdio, errors)
        message = os.read(reader, 64)
    if not message:
        return pid
    os.waitpid(pid, 0)
    number = int(message[1:])
    error = OSError(number, os.strerror(number))
    raise SpawnError(error, "exec", cwd) if message[:1] == _CANNOT_ENTER else error


def _be_child(
    account: Account,
    cwd: str,
    arguments: list[str],
    paths: list[str],
    environment: dict[str, str],
    stdio: Stdio,
    errors: int,
) -> NoReturn:
    """Become the user and execute the program in the child; report errors on a pipe that execve(2) closes."""
    stage = _CANNOT_START
    try:
        os.setsid()
        if stdio.terminal:
            os.dup2(os.open(stdio.terminal, os.O_RDWR), 0)
            stdio.inherited[:0] = [(0, 1), (0, 2)]
        for descriptor, number in stdio.inherited:
            os.dup2(descriptor, number)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        account.become()
        stage = _CANNOT_ENTER
        os.chdir(cwd)
        stage = _CANNOT_START
        _first_that_starts(paths, lambda path: os.execve(path, arguments, environment))  # noqa: S606 - nor could there be
    except OSError as error:
        os.write(errors, stage + b"%d" % (error.errno or 0))
    finally:
        os._exit(127)
    raise AssertionError
