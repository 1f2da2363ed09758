"""Run one command: capture its output, and kill its process tree at the timeout or when the caller hangs up."""

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
from collections import deque
from collections.abc import Callable, Mapping

from minisandbox.launch.kernel.cgroups import FILE_SIZE, PROCESSES, LimitCounters

from . import descendants
from .frames import Header, integer
from .job import WorkerJob
from .spawn import Pipes, SpawnError, Stdio, spawn, start_nothing

CHUNK = 1 << 16
DRAIN = 0.02
"""Seconds to wait for more output of background children once the leader has exited."""
_OUTPUTS = 2
"""Pipes of a command's output: stdout and stderr."""
_MOST_REAPED = 1000
_LONGEST_WAIT = 3600.0
"""Maximum seconds of one poll(2), which takes an int of milliseconds; the caller's loop polls again."""


class Capture:
    """Keeps the head and the tail of a stream, and counts the bytes between.

    Args:
        limit: bytes to keep, half from the start of the stream and half from its end.

    Attributes:
        dropped: bytes that were not kept.
    """

    def __init__(self, limit: int) -> None:
        self._head_room = limit // 2
        self._tail_room = limit - limit // 2
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.dropped = 0

    def add(self, chunk: bytes) -> None:
        """Add the next bytes of the stream."""
        if self._head_room:
            self._head.append(chunk[: self._head_room])
            head_size = len(self._head[-1])
            self._head_room -= head_size
            chunk = chunk[head_size:]
        if not chunk:
            return
        self._tail.append(chunk)
        self._tail_size += len(chunk)
        while self._tail_size > self._tail_room:
            self._shorten_tail(self._tail_size - self._tail_room)

    def _shorten_tail(self, excess: int) -> None:
        chunk = self._tail.popleft()
        cut_size = min(excess, len(chunk))
        if cut_size < len(chunk):
            self._tail.appendleft(chunk[cut_size:])
        self._tail_size -= cut_size
        self.dropped += cut_size

    def result(self) -> bytes:
        """Return the kept bytes; a line between head and tail reports the number of dropped bytes."""
        head, tail = b"".join(self._head), b"".join(self._tail)
        if not self.dropped:
            return head + tail
        return head + b"\n[... %d bytes dropped ...]\n" % self.dropped + tail


class OutputPipes:
    """Creates the pipes of a command's output ahead of time, while the worker waits for the request."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []

    def prepare(self) -> None:
        """Create the pipes, unless they exist or no descriptor is free."""
        with contextlib.suppress(OSError):
            while len(self._ready) < _OUTPUTS:
                self._ready.append(os.pipe2(os.O_CLOEXEC))

    def take(self, pipes: Pipes) -> tuple[int, int]:
        """Hand over a prepared pipe, or a new one; return its read end and its write end.

        Args:
            pipes: owner of both ends from now on.
        """
        if not self._ready:
            return pipes.make()
        read_end, write_end = self._ready.pop()
        return pipes.add(read_end), pipes.add(write_end)

    def close(self) -> None:
        """Close the prepared pipes."""
        while self._ready:
            for descriptor in self._ready.pop():
                os.close(descriptor)


class Leader:
    """A command's first process: its deadline, its exit status, its process tree.

    Args:
        pid: the process, a child of this one; 0 if no process could be started.
        timeout: wall-clock seconds that the command may run, or None.

    Attributes:
        pid: the process.
        status: its wait(2) status once it has exited, or None.
        timed_out: whether the command was killed at its deadline.
        usage: the resources it used, once it has exited.
        duration: seconds from its start to its exit.
        counters: counters of the limits that the command hits, or None.
    """

    def __init__(self, pid: int, timeout: float | None = None) -> None:
        self.pid = pid
        self.counters: LimitCounters | None = None
        self.status: int | None = None
        self.timed_out = False
        self.usage: resource.struct_rusage | None = None
        self.duration = 0.0
        self._childless = False
        self._started = time.monotonic()
        self._deadline = None if timeout is None else self._started + timeout

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self.status is not None

    def time_left(self) -> float | None:
        """Return the seconds until the deadline, or None without one."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def reap(self) -> bool:
        """Reap exited children: the leader, and orphans that this process adopted as their subreaper.

        One call reaps a limited batch, so that the caller's loop keeps running while a tree keeps forking.

        Returns:
            Whether there may be more exited children.
        """
        for _ in range(_MOST_REAPED):
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return False
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):  # it asked to be traced by its parent (ptrace(2)) and would wait forever
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                continue
            if pid == self.pid and not self.ended:
                self.status, self.usage = status, usage
                self.duration = time.monotonic() - self._started
        signal.raise_signal(signal.SIGCHLD)  # wakes the loop again
        return True

    def check_deadline(self) -> None:
        """Kill the whole tree if the deadline has passed before the leader ended."""
        remaining = self.time_left()
        if self.ended or remaining is None or remaining > 0.0:
            return
        self.timed_out = True
        self.kill_tree()
        self.duration = time.monotonic() - self._started

    def kill_tree(self) -> None:
        """Kill the leader and all its descendants, daemons included.

        Kill its process group first, by one call that no fork can outrun (kill(2)). A search for hundreds of processes
        is slow while all of them compete for the CPU.
        """
        # the pid cannot have been reused before the leader is reaped; OSError: it has no process group yet
        if self.pid > 0 and not self.ended:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        descendants.kill_all(self.reap)
        if self.status is None:
            self.status = signal.SIGKILL

    def signal(self, number: int) -> None:
        """Send a signal to the leader alone."""
        # the pid cannot have been reused before the leader is reaped; OSError: it has just exited
        if not self.ended:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def has_left_running(self) -> bool:
        """Return whether any process of its tree is alive, without a search through /proc."""
        if not self._childless:
            self.reap()
        return not self._childless and descendants.have_children()

    def count_left_running(self) -> int:
        """Return how many processes of its tree are alive."""
        return len(descendants.descendants()) if self.has_left_running() else 0

    def exit_header(self, left_running: int) -> Header:
        """Return the header of the final frame: exit status, usage and limits, with empty output."""
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
        """Return the limits that the command hit. The file size limit shows only as SIGXFSZ or a shell's status."""
        is_too_large = status in (signal.SIGXFSZ, 128 + signal.SIGXFSZ << 8)
        return [*(self.counters.hits() if self.counters else ()), *((FILE_SIZE,) if is_too_large else ())]


class Command:
    """A running command. Make one with :meth:`start`."""

    def __init__(self, leader: Leader, stdin: int, outputs: Mapping[int, Capture], stdin_data: bytes) -> None:
        self._leader = leader
        self._stdin = stdin
        self._unwritten = memoryview(stdin_data)
        self._outputs = dict(outputs)
        self._open = set(outputs)

    @classmethod
    def start(cls, job: WorkerJob, output_pipes: OutputPipes, start: Callable[[Header, Stdio], int] = spawn) -> Command:
        """Start the command of a request.

        The request has ``argv`` or ``script``, ``env`` (pairs), ``cwd``, ``user``, ``timeout`` (seconds or null),
        ``stdin`` (whether the payload is its standard input) and ``output`` (bytes kept per stream).

        Raises:
            SpawnError: there is no such user or directory.
            OSError: no process could be started, for example at the process limit.
        """
        request = job.request
        with Pipes() as pipes:
            stdin, stdin_write = pipes.make() if request["stdin"] else (pipes.null(), -1)
            (out_read, out_write), (err_read, err_write) = output_pipes.take(pipes), output_pipes.take(pipes)
            leader = Leader(start(request, Stdio([(stdin, 0), (out_write, 1), (err_write, 2)])), timeout_of(request))
            leader.counters = job.counters
            pipes.keep(*filter(lambda end: end >= 0, (stdin_write, out_read, err_read)))
        outputs = dict(zip((out_read, err_read), new_captures(request), strict=True))
        return cls(leader, stdin_write, outputs, job.payload)

    def end_at_once(self) -> None:
        """Mark the process as exited, for a rehearsal, which starts no process."""
        self._leader.status = 0

    def watch(self, job: WorkerJob, wakeup: int) -> bool:
        """Supervise the command until its leader exits, its deadline passes, or the controller hangs up.

        Returns:
            Whether background processes of the command are still running.
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
            self._move(events, poll)
            leader.check_deadline()
        self._drain()
        left_running = leader.count_left_running()
        job.send(*with_output(leader.exit_header(left_running), list(self._outputs.values())))
        return left_running > 0

    def outlive(self, wakeup: int) -> None:
        """Reap its background processes and discard their output until the last one has exited."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        self._register(poll)
        while self._leader.has_left_running():
            events = dict(poll.poll())
            if wakeup in events:
                os.read(wakeup, 4096)
            self._move(events, poll)

    def close(self) -> None:
        """Close its pipes."""
        for descriptor in (*self._outputs, self._stdin):
            if descriptor >= 0:
                os.close(descriptor)
        self._outputs, self._stdin = {}, -1

    def _register(self, poll: select.poll) -> None:
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        if self._stdin >= 0:
            poll.register(self._stdin, select.POLLOUT)

    def _move(self, events: Mapping[int, int], poll: select.poll) -> None:
        """Read from and write to the pipes that are ready."""
        for descriptor in self._open & events.keys():
            self._read(descriptor, poll)
        if self._stdin in events:
            self._feed(poll)

    def _read(self, descriptor: int, poll: select.poll) -> int:
        """Read from a pipe once; return the number of bytes."""
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return 0
        if chunk:
            self._outputs[descriptor].add(chunk)
        else:
            poll.unregister(descriptor)
            self._open.discard(descriptor)
        return len(chunk)

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

    def _drain(self) -> None:
        """Read the leader's remaining output, then wait briefly for output of its background children."""
        deadline = time.monotonic() + DRAIN
        poll = select.poll()
        for descriptor in tuple(self._open):
            poll.register(descriptor, select.POLLIN)
            remaining = readable(descriptor)
            while remaining > 0 and (received := self._read(descriptor, poll)):
                remaining -= received
        while self._open and (wait := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(wait * 1000):
                self._read(descriptor, poll)


def serve(job: WorkerJob, wakeup: int, output_pipes: OutputPipes) -> Command | None:
    """Serve an ``exec`` request; return the command if its background processes are still running, or None."""
    try:
        command = Command.start(job, output_pipes)
    except SpawnError as error:
        job.fail(error, error.operation, error.path)
        return None
    except OSError as error:
        job.send(*refusal(error))
        return None
    if command.watch(job, wakeup):
        return command
    command.close()
    return None


def rehearse(job: WorkerJob, wakeup: int, output_pipes: OutputPipes) -> None:
    """Run the code of a command without starting one, so that memory pages are copied before the first command."""
    command = Command.start(job, output_pipes, start_nothing)
    command.end_at_once()
    command.watch(job, wakeup)
    command.close()


def new_captures(request: Header) -> list[Capture]:
    """Return empty captures for stdout and stderr, with the limit of the request."""
    return [Capture(integer(request, "output")) for _ in range(2)]


def refusal(error: OSError) -> tuple[Header, bytes]:
    """Return the final frame of a command that could not be started, with a shell's status 126."""
    leader = Leader(0)
    leader.status = 126 << 8
    hits = {"hit": [PROCESSES]} if error.errno == errno.EAGAIN else {}
    return leader.exit_header(0) | hits, f"cannot start a process: {error.strerror}\n".encode()


def with_output(header: Header, captures: list[Capture]) -> tuple[Header, bytes]:
    """Return a final frame with the kept bytes of stdout and stderr."""
    outputs = [capture.result() for capture in captures]
    header |= {"dropped": [capture.dropped for capture in captures], "stdout_size": len(outputs[0])}
    return header, b"".join(outputs)


def timeout_of(request: Header) -> float | None:
    """Return the timeout of a request in seconds, or None."""
    timeout = request["timeout"]
    return float(timeout) if isinstance(timeout, int | float) else None


def milliseconds(seconds: float | None) -> float | None:
    """Convert a wait in seconds to a timeout for poll(2)."""
    return None if seconds is None else max(0.0, min(seconds, _LONGEST_WAIT) * 1000)


def readable(descriptor: int) -> int:
    """Return the number of unread bytes in a pipe. Callers read only those, because a writer may never stop."""
    count: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    return count
