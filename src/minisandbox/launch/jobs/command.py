"""One command of a sandbox: started, watched, its output kept, its whole tree ended when it must."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from minisandbox.launch.kernel.cgroups import FILE_SIZE, PROCESSES, LimitCounters

from . import descendants
from .capture import Capture
from .frames import Header
from .spawn import RefusedError, Stdio, spawn

if TYPE_CHECKING:
    from .worker import Job

CHUNK = 1 << 16
_MOST_AT_ONCE = 1000  # processes that are collected
DRAIN = 0.02
"""Seconds that output of background children is still waited for once the leader has ended."""
LONGEST_WAIT = 3600.0
"""poll(2) takes an int of milliseconds; what is more distant is looked at again."""


class Leader:
    """A command's first process: its end, its deadline, its tree.

    Args:
        pid: the process, a child of ours.
        timeout: wall seconds it has, or None.

    Attributes:
        pid: the process.
        status: how it ended (wait(2)), or None.
        timed_out: whether its deadline ended it.
        usage: what it used, once it has ended by itself or was killed.
        duration: seconds from its start to its end.
        counters: tell which limits it ran into, if anybody keeps one.
    """

    def __init__(self, pid: int, timeout: float | None = None) -> None:
        self.pid = pid
        self.counters: LimitCounters | None = None
        self.status: int | None = None
        self.timed_out = False
        self.usage: resource.struct_rusage | None = None
        self.duration = 0.0
        self._started = time.monotonic()
        self._deadline = None if timeout is None else self._started + timeout

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status is not None

    def time_left(self) -> float | None:
        """Seconds until the deadline, or None without one."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def reap(self) -> bool:
        """Collect what has ended: the leader, and orphans that fell to us as their subreaper.

        A tree may make them faster than they are collected: after a number of them the caller's loop has its turn.

        Returns:
            Whether there may be more.
        """
        for _ in range(_MOST_AT_ONCE):
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):  # it has asked to be traced by us, and would wait for ever
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                continue
            if pid == self.pid and not self.ended:
                self.status, self.usage = status, usage
                self.duration = time.monotonic() - self._started
        signal.raise_signal(signal.SIGCHLD)  # this wakes the loop again
        return True

    def check_deadline(self) -> None:
        """End the whole tree if the deadline has passed before the leader ended."""
        left = self.time_left()
        if self.ended or left is None or left > 0.0:
            return
        self.timed_out = True
        self.kill_tree()
        self.duration = time.monotonic() - self._started

    def kill_tree(self) -> None:
        """End the leader and everything that descends from it, daemons included.

        First its process group, by one call that none can outrun (kill(2)). Looking for hundreds of processes takes
        long where each wants the processor as much as we do: outside of autogroups (sched(7)), as in control groups.
        """
        if self.pid > 0 and not self.ended:  # there is one, and not reaped: the number is still its own
            with contextlib.suppress(OSError):  # it has no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
        descendants.kill_all(self.reap)
        if self.status is None:
            self.status = signal.SIGKILL

    def signal(self, number: int) -> None:
        """Send a signal to the leader alone."""
        if not self.ended:  # not reaped: the number is still its own
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(self.pid, number)

    def has_left_running(self) -> bool:
        """Whether any of its processes is alive; at the price of one call, not of a look at each."""
        self.reap()
        return descendants.have_children()

    def count_left_running(self) -> int:
        """How many of its processes are alive."""
        self.reap()
        return len(descendants.descendants()) if descendants.have_children() else 0

    def fate(self, left_running: int) -> Header:
        """The final frame's header: how it ended; nothing about output yet."""
        assert self.status is not None
        usage = self.usage
        return {
            "event": "exit",
            "status": self.status,
            "timed_out": self.timed_out,
            "duration": self.duration,
            "usage": [usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024] if usage else [0.0, 0.0, 0],
            "left_running": left_running,
            "dropped": [0, 0],
            "stdout_size": 0,
            "hit": self._hits(self.status),
        }

    def _hits(self, status: int) -> list[str]:
        """The limits that it ran into; of a file's size there is but the signal, which a shell tells by its status."""
        too_large = status in (signal.SIGXFSZ, 128 + signal.SIGXFSZ << 8)
        return [*(self.counters.hits() if self.counters else ()), *((FILE_SIZE,) if too_large else ())]


class Command:
    """A running command. Make one with :meth:`start`."""

    def __init__(self, leader: Leader, stdin: int, outputs: Mapping[int, Capture], data: bytes) -> None:
        self._leader = leader
        self._stdin = stdin
        self._unwritten = memoryview(data)
        self._outputs = dict(outputs)
        self._open = set(outputs)

    @classmethod
    def start(cls, request: Header, data: bytes) -> Command:
        """Start what a request asks for.

        Args:
            request: ``argv`` or ``script``, ``env`` (pairs), ``timeout`` (seconds or null), ``stdin`` (whether
                ``data`` is fed), ``output`` (bytes kept per stream).
            data: bytes for its standard input.

        Raises:
            RefusedError: there is no such user or directory.
            OSError: no process could be made, for example because the limit of processes is reached.
        """
        limit = request["output"]
        assert isinstance(limit, int)
        with Pipes() as pipes:
            stdin, stdin_write = pipes.make() if request["stdin"] else (pipes.null(), -1)
            (out_read, out), (err_read, err) = pipes.make(), pipes.make()
            pid = spawn(request, Stdio([(stdin, 0), (out, 1), (err, 2)]))
            kept = (stdin_write, out_read, err_read) if stdin_write >= 0 else (out_read, err_read)
            pipes.keep(*kept)
        outputs = {out_read: Capture(limit), err_read: Capture(limit)}
        return cls(Leader(pid, timeout_of(request)), stdin_write, outputs, data)

    def _register(self, poll: select.poll) -> None:
        """Have its pipes watched."""
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        if self._stdin >= 0:
            poll.register(self._stdin, select.POLLOUT)

    def _handle(self, events: Mapping[int, int], poll: select.poll) -> None:
        """Move bytes on the pipes that are ready."""
        for descriptor in self._open & events.keys():
            self._read(descriptor, poll)
        if self._stdin in events:
            self._feed(poll)

    def _read(self, descriptor: int, poll: select.poll) -> int:
        """Read once; returns how many bytes there were."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return 0
        if data:
            self._outputs[descriptor].add(data)
        else:
            poll.unregister(descriptor)
            self._open.discard(descriptor)
        return len(data)

    def _feed(self, poll: select.poll) -> None:
        try:
            written = os.write(self._stdin, self._unwritten[:CHUNK]) if self._unwritten else 0
            self._unwritten = self._unwritten[written:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unwritten = self._unwritten[:0]
        if not self._unwritten:
            poll.unregister(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def drain(self) -> None:
        """Read what the leader left in its pipes; wait a moment for its background children, never for long."""
        deadline = time.monotonic() + DRAIN
        poll = select.poll()
        for descriptor in tuple(self._open):
            poll.register(descriptor, select.POLLIN)
            left = readable(descriptor)
            while left > 0 and (taken := self._read(descriptor, poll)):
                left -= taken
        while self._open and (wait := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(wait * 1000):
                self._read(descriptor, poll)

    def report(self, left_running: int) -> tuple[Header, bytes]:
        """The final frame: how it ended, and what was kept of its output (stdout, then stderr)."""
        return with_output(self._leader.fate(left_running), list(self._outputs.values()))

    def close(self) -> None:
        """Close its pipes."""
        for descriptor in (*self._outputs, self._stdin):
            if descriptor >= 0:
                os.close(descriptor)
        self._outputs, self._stdin = {}, -1

    def watch(self, job: Job, wakeup: int) -> bool:
        """Follow it until its leader has ended, its deadline has passed, or the controller has hung up.

        Returns:
            Whether processes of it are still running.
        """
        leader = self._leader
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        poll.register(job.connection, select.POLLIN | select.POLLRDHUP)
        self._register(poll)
        while not leader.ended:
            events = dict(poll.poll(milliseconds(leader.time_left())))
            if wakeup in events:
                os.read(wakeup, 4096)
                leader.reap()
            if job.connection.fileno() in events:
                leader.kill_tree()
                return False
            self._handle(events, poll)
            leader.check_deadline()
        self.drain()
        left_running = leader.count_left_running()
        job.send(*self.report(left_running))
        return left_running > 0

    def record_in(self, counters: LimitCounters) -> None:
        """Have its report tell which limits it ran into."""
        self._leader.counters = counters

    def outlive(self, wakeup: int) -> None:
        """Keep its background processes reaped and their output flowing, until the last has ended."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        self._register(poll)
        while self._leader.has_left_running():
            events = dict(poll.poll())
            if wakeup in events:
                os.read(wakeup, 4096)
            self._handle(events, poll)


def serve(job: Job, wakeup: int) -> Command | None:
    """Carry out an ``exec`` request; returns the command if processes of it are still running."""
    try:
        command = Command.start(job.request, job.payload)
    except RefusedError as error:
        job.fail(error, error.operation, error.path)
        return None
    except OSError as error:
        job.send(*refusal(error))
        return None
    command.record_in(job.counters)
    if command.watch(job, wakeup):
        return command
    command.close()
    return None


def refusal(error: OSError) -> tuple[Header, bytes]:
    """The final frame of a command that could not be started: a shell's 126."""
    leader = Leader(0)
    leader.status = 126 << 8
    hit = {"hit": [PROCESSES]} if error.errno == errno.EAGAIN else {}
    return leader.fate(0) | hit, f"cannot start a process: {error.strerror}\n".encode()


def with_output(header: Header, captures: list[Capture]) -> tuple[Header, bytes]:
    """A final frame with what was kept of stdout and stderr."""
    kept = [capture.result() for capture in captures]
    header |= {"dropped": [capture.dropped for capture in captures], "stdout_size": len(kept[0])}
    return header, b"".join(kept)


def timeout_of(request: Header) -> float | None:
    """The seconds that a request gives, or None."""
    timeout = request["timeout"]
    return float(timeout) if isinstance(timeout, int | float) else None


def milliseconds(seconds: float | None) -> float | None:
    """A wait for poll(2)."""
    return None if seconds is None else max(0.0, min(seconds, LONGEST_WAIT) * 1000)


def readable(descriptor: int) -> int:
    """How many bytes wait in a pipe. A writer that goes on could keep us reading for ever; these it wrote before."""
    count: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    return count


class Pipes:
    """Descriptors that are closed at the end of a ``with`` block, but for those that are kept."""

    def __init__(self) -> None:
        self._opened: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._opened:
            os.close(descriptor)

    def make(self) -> tuple[int, int]:
        """A pipe: (end to read, end to write)."""
        ends = os.pipe2(os.O_CLOEXEC)
        self._opened.update(ends)
        return ends

    def null(self) -> int:
        """An empty input."""
        return self.add(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def add(self, descriptor: int) -> int:
        """Take charge of a descriptor."""
        self._opened.add(descriptor)
        return descriptor

    def keep(self, *descriptors: int) -> None:
        """Leave these open, for use without waiting."""
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._opened.discard(descriptor)
