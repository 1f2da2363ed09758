"""Starting a program: as the sandbox's own user by posix_spawn(3), as another one by a forked child."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from typing import NoReturn

from . import users
from .frames import Header
from .users import Account

_ARGUMENT_MAX = 120_000
"""Longest single argument: MAX_ARG_STRLEN is 128 KiB (execve(2)); longer scripts go by a descriptor."""
_SCRIPT = 3
_SCORE_ABOVE_OURS, _HIGHEST_SCORE = 500, 1000
"""When memory runs out, the kernel ends commands and what they start rather than their supervisors (proc(5))."""
_EXECVE_PAUSES = tuple(0.00005 * 2**n for n in range(11))
"""Seconds between looks at a child in execve(2), 0.1 s in all. They double: an early end is seen early."""
_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT)
_CANNOT_ENTER, _CANNOT_START = b"d", b"x"


class RefusedError(OSError):
    """A request that cannot be carried out as it was asked for.

    Attributes:
        operation: ``user`` or ``exec``.
        path: the user, or the directory that cannot be entered.
    """

    def __init__(self, error: OSError, operation: str, path: object) -> None:
        super().__init__(error.errno, error.strerror)
        self.operation = operation
        self.path = path


@dataclass(slots=True)
class Stdio:
    """What a new process finds at its descriptors.

    Attributes:
        given: (descriptor of ours, number it gets).
        terminal: path of a terminal that becomes its controlling one and its standard descriptors, or "".
    """

    given: list[tuple[int, int]] = field(default_factory=list)
    terminal: str = ""


def spawn(request: Header, stdio: Stdio) -> int:
    """Start what a request asks for, in a session of its own; returns its pid.

    What cannot be executed becomes a shell's 127 or 126.

    Args:
        request: ``argv`` or ``script``, ``env`` (pairs), ``cwd``, ``user`` (name, uid or null).
        stdio: its descriptors.

    Raises:
        RefusedError: there is no such user or directory.
        OSError: no process could be made, for example because the limit of processes is reached.
    """
    pairs = request["env"]
    assert isinstance(pairs, list)
    environment = {str(name): str(value) for name, value in pairs}
    account = _account(request.get("user"), environment)
    pid = _start(request, stdio, environment, account)
    with contextlib.suppress(OSError), _open_score(pid) as score:  # it may have ended already
        score.write(b"%d" % min(_own_score() + _SCORE_ABOVE_OURS, _HIGHEST_SCORE))
    return pid


def _open_score(pid: int) -> FileIO:
    """Open a new command's oom_score_adj, once the command is dumpable.

    We are not, and neither is a child before the end of its execve(2): its files in /proc are the machine's root's. A
    kernel with preemption returns from vfork(2) earlier than that, and opening fails with EACCES.

    Raises:
        OSError: it has ended, or is never dumpable: its user may execute the program, but not read it.
    """
    path = f"/proc/{pid}/oom_score_adj"
    for pause in _EXECVE_PAUSES:
        try:
            return open(path, "wb", buffering=0)
        except PermissionError:
            time.sleep(pause)
    return open(path, "wb", buffering=0)


def _own_score() -> int:
    with open("/proc/self/oom_score_adj", "rb", buffering=0) as score:
        return int(score.read())


def _start(request: Header, stdio: Stdio, environment: dict[str, str], account: Account | None) -> int:
    cwd = str(request["cwd"])
    with _arguments(request, stdio) as arguments:
        if account is not None:
            for descriptor, _ in stdio.given:
                account.own(descriptor)
            if stdio.terminal:
                os.chown(stdio.terminal, account.uid, -1)
            return _or_complain(
                arguments, environment, lambda words, paths: _fork(account, cwd, words, paths, environment, stdio)
            )
        with _inside(cwd):
            return _or_complain(arguments, environment, lambda words, paths: _spawn(words, paths, environment, stdio))


def _account(user: object, environment: dict[str, str]) -> Account | None:
    """Whom to become, or None for who we are."""
    if not isinstance(user, str | int):
        return None
    try:
        account = users.find(user)
    except OSError as error:
        raise RefusedError(error, "user", user) from error
    account.complete(environment)
    return None if account.is_root else account


@contextlib.contextmanager
def _inside(directory: str) -> Iterator[None]:
    try:
        os.chdir(directory)
    except OSError as error:
        raise RefusedError(error, "exec", directory) from error
    try:
        yield
    finally:
        os.chdir("/")


@contextlib.contextmanager
def _arguments(request: Header, stdio: Stdio) -> Iterator[list[str]]:
    """The argument list; a long script gets a descriptor for as long as starting takes."""
    script, argv = request.get("script"), request.get("argv")
    if not isinstance(script, str):
        assert isinstance(argv, list)
        yield [str(part) for part in argv]
    elif len(script) <= _ARGUMENT_MAX // 4 or len(os.fsencode(script)) <= _ARGUMENT_MAX:
        yield ["bash", "-c", script]
    else:
        holder = _script_file(os.fsencode(script))
        stdio.given.append((holder, _SCRIPT))
        try:
            yield ["bash", f"/dev/fd/{_SCRIPT}"]
        finally:
            os.close(holder)


def _script_file(script: bytes) -> int:
    """An unnamed file that holds a script too long for an argument."""
    descriptor = os.memfd_create("script")
    with open(os.dup(descriptor), "wb") as out:
        out.write(script)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _or_complain(
    arguments: list[str], environment: dict[str, str], start: Callable[[list[str], list[str]], int]
) -> int:
    """Start a program, or a shell that says why it cannot be executed."""
    try:
        return start(arguments, _candidates(arguments[0], environment.get("PATH", os.defpath)))
    except RefusedError:
        raise
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise
        code, message = (127, "not found") if error.errno == errno.ENOENT else (126, str(error.strerror))
    complaint = ["sh", "-c", 'printf "%s: %s\\n" "$1" "$2" >&2; exit "$3"', "sh", arguments[0], message, str(code)]
    return start(complaint, ["/bin/sh"])


def _candidates(program: str, search_path: str) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(directory or ".", program) for directory in search_path.split(":")]


def _first_that_starts(paths: list[str], start: Callable[[str], int]) -> int:
    """What execvp(3) does: go on where there is no such file; remember any other failure; stop for want of memory."""
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in paths:
        try:
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
    if stdio.terminal:  # opened by the leader of a new session, it becomes the controlling terminal (tty_ioctl(4))
        actions.append((os.POSIX_SPAWN_OPEN, 0, stdio.terminal, os.O_RDWR, 0))
        actions += [(os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)]
    actions += [(os.POSIX_SPAWN_DUP2, descriptor, number) for descriptor, number in stdio.given]
    return _first_that_starts(
        paths,
        lambda path: os.posix_spawn(
            path, arguments, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
        ),
    )


def _fork(
    account: Account, cwd: str, arguments: list[str], paths: list[str], environment: dict[str, str], stdio: Stdio
) -> int:
    """Start a program as another user.

    posix_spawn(3) cannot change the user, and who looks for the program and its directory must be that user.
    """
    said, say = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _be_child(account, cwd, arguments, paths, environment, stdio, fcntl.fcntl(say, fcntl.F_DUPFD_CLOEXEC, 4))
        os.close(say)
        say = -1
        answer = os.read(said, 64)
    finally:
        os.close(said)
        if say >= 0:
            os.close(say)
    if not answer:
        return pid
    os.waitpid(pid, 0)
    number = int(answer[1:])
    error = OSError(number, os.strerror(number))
    raise RefusedError(error, "exec", cwd) if answer[:1] == _CANNOT_ENTER else error


def _be_child(
    account: Account,
    cwd: str,
    arguments: list[str],
    paths: list[str],
    environment: dict[str, str],
    stdio: Stdio,
    say: int,
) -> NoReturn:
    """In the child: become the user and the program. What fails goes to the parent; the pipe closes by itself."""
    stage = _CANNOT_START
    try:
        os.setsid()
        if stdio.terminal:
            os.dup2(os.open(stdio.terminal, os.O_RDWR), 0)
            stdio.given[:0] = [(0, 1), (0, 2)]
        for descriptor, number in stdio.given:
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
        os.write(say, stage + b"%d" % (error.errno or 0))
    finally:
        os._exit(127)
    raise AssertionError
