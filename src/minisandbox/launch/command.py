"""One command of a sandbox: started, watched, its output kept, its whole tree ended when it must."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Mapping

from .capture import Capture
from .frames import Header

_CHUNK = 1 << 16
_DRAIN = 0.02
"""Seconds that output of background children is still waited for once the leader has ended."""
_KILL_PATIENCE = 10.0
_ARGUMENT_MAX = 120_000
"""Longest single argument: MAX_ARG_STRLEN is 128 KiB (execve(2)); longer scripts go by a descriptor."""
_RESET = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT]


class Command:
    """A running command. Make one with :meth:`start`."""

    def __init__(
        self, pid: int, stdin: int, outputs: Mapping[int, Capture], data: bytes, timeout: float | None
    ) -> None:
        self._pid = pid
        self._stdin = stdin
        self._unwritten = memoryview(data)
        self._outputs = dict(outputs)
        self._open = set(outputs)
        self._started = time.monotonic()
        self._deadline = None if timeout is None else self._started + timeout
        self._duration = 0.0
        self._status: int | None = None
        self._usage: resource.struct_rusage | None = None
        self._timed_out = False

    @classmethod
    def start(cls, request: Header, data: bytes) -> Command:
        """Start what a request asks for.

        Args:
            request: ``argv`` or ``script``, ``env`` (pairs), ``timeout`` (seconds or null), ``stdin`` (whether
                ``data`` is fed), ``output`` (bytes kept per stream).
            data: bytes for its standard input.

        Raises:
            OSError: no process could be made, for example because the limit of processes is reached.
        """
        limit, timeout = request["output"], request["timeout"]
        assert isinstance(limit, int)
        opened: list[int] = []
        try:
            stdin_read, stdin_write = _pipe(opened) if request["stdin"] else (_null(opened), -1)
            out_read, out_write = _pipe(opened)
            err_read, err_write = _pipe(opened)
            pid = _spawn(request, (stdin_read, out_write, err_write))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        for descriptor in (stdin_read, out_write, err_write):
            os.close(descriptor)
        for descriptor in (stdin_write, out_read, err_read):
            if descriptor >= 0:
                os.set_blocking(descriptor, False)
        outputs = {out_read: Capture(limit), err_read: Capture(limit)}
        return cls(pid, stdin_write, outputs, data, float(timeout) if isinstance(timeout, int | float) else None)

    @property
    def ended(self) -> bool:
        """Whether the leader has ended."""
        return self._status is not None

    def time_left(self) -> float | None:
        """Seconds until the deadline, or None without one."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def register(self, poll: select.poll) -> None:
        """Have its pipes watched."""
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        if self._stdin >= 0:
            poll.register(self._stdin, select.POLLOUT)

    def handle(self, events: Mapping[int, int], poll: select.poll) -> None:
        """Move bytes on the pipes that are ready."""
        for descriptor in self._open & events.keys():
            self._read(descriptor, poll)
        if self._stdin in events:
            self._feed(poll)

    def _read(self, descriptor: int, poll: select.poll) -> bool:
        """Read once; returns whether there may be more right now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._outputs[descriptor].add(data)
            return True
        poll.unregister(descriptor)
        self._open.discard(descriptor)
        return False

    def _feed(self, poll: select.poll) -> None:
        try:
            written = os.write(self._stdin, self._unwritten[:_CHUNK]) if self._unwritten else 0
            self._unwritten = self._unwritten[written:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unwritten = self._unwritten[:0]
        if not self._unwritten:
            poll.unregister(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def reap(self) -> None:
        """Collect whatever has ended: the leader, and orphans that fell to us as their subreaper."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status, self._usage = status, usage
                self._duration = time.monotonic() - self._started

    def check_deadline(self) -> None:
        """End the whole tree if the deadline has passed before the leader ended."""
        left = self.time_left()
        if self.ended or left is None or left > 0.0:
            return
        self._timed_out = True
        self.kill_tree()
        if self._status is None:
            self._status = signal.SIGKILL
        self._duration = time.monotonic() - self._started

    def kill_tree(self) -> None:
        """End the command and everything that descends from it, daemons included.

        Stopping first keeps a tree that forks faster than we look from outrunning us.
        """
        give_up = time.monotonic() + _KILL_PATIENCE
        stopped: set[int] = set()
        while fresh := _descendants() - stopped:
            _signal_all(fresh, signal.SIGSTOP)
            stopped |= fresh
        while time.monotonic() < give_up:
            _signal_all(_descendants(), signal.SIGKILL)
            self.reap()
            if not _has_children():
                return
            time.sleep(0.0005)

    def drain(self) -> None:
        """Read what the leader left in its pipes; wait a moment for its background children, never for long."""
        deadline = time.monotonic() + _DRAIN
        poll = select.poll()
        for descriptor in tuple(self._open):
            poll.register(descriptor, select.POLLIN)
            while self._read(descriptor, poll):
                pass
        while self._open and (wait := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(wait * 1000):
                self._read(descriptor, poll)

    def count_left_running(self) -> int:
        """How many of its processes are alive."""
        self.reap()
        return len(_descendants()) if _has_children() else 0

    def report(self, left_running: int) -> tuple[Header, bytes]:
        """The final frame: how it ended, and what was kept of its output (stdout, then stderr)."""
        assert self._status is not None
        kept = [capture.result() for capture in self._outputs.values()]
        usage = self._usage
        header: Header = {
            "event": "exit",
            "status": self._status,
            "timed_out": self._timed_out,
            "duration": self._duration,
            "usage": [usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024] if usage else [0.0, 0.0, 0],
            "left_running": left_running,
            "dropped": [capture.dropped for capture in self._outputs.values()],
            "stdout_size": len(kept[0]),
        }
        return header, b"".join(kept)

    def close(self) -> None:
        """Close its pipes."""
        for descriptor in (*self._outputs, self._stdin):
            if descriptor >= 0:
                os.close(descriptor)
        self._outputs, self._stdin = {}, -1


def refusal(error: OSError) -> tuple[Header, bytes]:
    """The final frame of a command that could not be started for want of processes or memory: a shell's 126."""
    complaint = f"cannot start a process: {error.strerror}\n".encode()
    header: Header = {
        "event": "exit",
        "status": 126 << 8,
        "timed_out": False,
        "duration": 0.0,
        "usage": [0.0, 0.0, 0],
        "left_running": 0,
        "dropped": [0, 0],
        "stdout_size": 0,
    }
    return header, complaint


def _has_children() -> bool:
    """Whether any process below this one exists: as a subreaper it is the parent of every orphan."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _pipe(opened: list[int]) -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    opened += ends
    return ends


def _null(opened: list[int]) -> int:
    opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    return opened[-1]


def _spawn(request: Header, stdio: tuple[int, int, int]) -> int:
    """Start the process, in a session of its own; what cannot be executed becomes a shell's 127 or 126."""
    pairs, script, argv = request["env"], request.get("script"), request.get("argv")
    assert isinstance(pairs, list)
    environment = {str(name): str(value) for name, value in pairs}
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, descriptor, n) for n, descriptor in enumerate(stdio)]
    holder = -1
    if isinstance(script, str):
        arguments = ["bash", "-c", script]
        if len(script) > _ARGUMENT_MAX // 4 and len(os.fsencode(script)) > _ARGUMENT_MAX:
            holder = _script_file(os.fsencode(script))
            actions.append((os.POSIX_SPAWN_DUP2, holder, 3))
            arguments = ["bash", "/dev/fd/3"]
    else:
        assert isinstance(argv, list)
        arguments = [str(part) for part in argv]
    try:
        return _spawn_found(arguments, environment, actions)
    finally:
        if holder >= 0:
            os.close(holder)


def _spawn_found(arguments: list[str], environment: dict[str, str], actions: list[tuple[int, ...]]) -> int:
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in _candidates(arguments[0], environment.get("PATH", os.defpath)):
        try:
            return os.posix_spawn(
                path, arguments, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
            )
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise
            failure = error
    code, message = (127, "not found") if failure.errno == errno.ENOENT else (126, str(failure.strerror))
    complaint = ["sh", "-c", 'printf "%s: %s\\n" "$1" "$2" >&2; exit "$3"', "sh", arguments[0], message, str(code)]
    return os.posix_spawn("/bin/sh", complaint, environment, file_actions=actions, setsid=True, setsigdef=_RESET)


def _candidates(program: str, search_path: str) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(directory or ".", program) for directory in search_path.split(":")]


def _script_file(script: bytes) -> int:
    """An unnamed file that holds a script too long for an argument."""
    descriptor = os.memfd_create("script")
    with open(os.dup(descriptor), "wb") as out:
        out.write(script)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def child_processes(pid: int) -> set[int]:
    """The live children of a process, from the parents that /proc names."""
    return set(_children().get(pid, ()))


def _descendants() -> set[int]:
    """Every live process below this one."""
    children = _children()
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def _children() -> dict[int, list[int]]:
    """The live processes of this sandbox by their parents."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X") or _has_threads(name):
                    children.setdefault(int(parent), []).append(int(name))
    return children


def _has_threads(pid: str) -> bool:
    """Whether a process that looks like a zombie goes on: only its first thread has ended (proc(5))."""
    return len(os.listdir(f"/proc/{pid}/task")) > 1


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
