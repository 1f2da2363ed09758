"""A worker: the process inside a sandbox that carries out one job at a time.

It takes a job's socket from the sandbox's control socket, reads one request frame from it, and answers on it. For a
command it is the subreaper (prctl(2)): whatever the command starts, daemonised or not, stays its descendant, so that a
deadline or a hang-up ends the command's whole tree and nothing else. It runs with the same uid as the commands, but is
not dumpable, so that they cannot trace it or read its memory.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterator

from . import files, frames
from . import syscalls as sc
from .command import Command, refusal

_IDLE_PATIENCE = 1.0
_LONGEST_WAIT = 3600.0
FAILED = 70
"""Exit status of a worker that broke: a mistake of ours, or too few resources left to take a job."""

BUSY, IDLE, RETIRED = b"b", b"i", b"r"
"""Notes to pid 1: the worker took a job; waits for one; will take none again, because its command goes on."""
_NOTE = struct.Struct("=c3xI")


def read_notes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Take notes apart: what, and the pid of the worker that says so. Notes are written whole (pipe(7))."""
    yield from _NOTE.iter_unpack(data)


class Job:
    """One request's socket, as the worker sees it.

    Attributes:
        request: the request's header.
        payload: the request's bytes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = frames.Decoder()
        self._pending: list[tuple[frames.Header, bytes]] = []
        self.request, self.payload = self.receive()

    def receive(self) -> tuple[frames.Header, bytes]:
        """The next frame from the controller.

        Raises:
            EOFError: the controller hung up.
        """
        while not self._pending:
            data = self.connection.recv(1 << 20)
            if not data:
                raise EOFError
            self._pending.extend(self._decoder.feed(data))
        return self._pending.pop(0)

    def send(self, header: frames.Header, payload: bytes = b"") -> None:
        """Answer; a controller that hung up does not want it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.sendall(frames.encode(header, payload))

    def fail(self, error: OSError, operation: str, path: object = "") -> None:
        """Answer that the job could not be done."""
        self.send(
            {"event": "error", "errno": error.errno, "message": error.strerror, "operation": operation, "path": path}
        )


def main(control: socket.SocketType, notes: int, rlimits: tuple[tuple[str, int], ...], *, primary: bool) -> None:
    """Serve jobs: the primary worker until the sandbox ends, an extra one just once. Never returns.

    Args:
        control: the socket on which jobs arrive; all workers of the sandbox wait on it.
        notes: pipe on which pid 1 is told what this worker does.
        rlimits: (name without ``RLIMIT_``, value) pairs for this process and so for every command.
        primary: whether it stays after its first job.
    """
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, value in rlimits:
        _limit(getattr(resource, f"RLIMIT_{name}"), value)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    while True:
        connection = _take_job(control)
        _note(notes, BUSY)
        unfinished = _serve(connection, wakeup)
        if unfinished is not None:
            _note(notes, RETIRED)
            _outlive(unfinished, wakeup)
        if unfinished is not None or not primary:
            os._exit(0)
        _note(notes, IDLE)


def _note(notes: int, note: bytes) -> None:
    os.write(notes, _NOTE.pack(note, os.getpid()))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _take_job(control: socket.SocketType) -> socket.socket:
    """Wait for a job's socket; several workers may wait on the same control socket.

    A worker that is not needed for a while ends, so that an idle sandbox is one process; pid 1 forks another in time.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        if not poll.poll(_IDLE_PATIENCE * 1000):
            os._exit(0)
        try:
            flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            data, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(4), flags)
        except BlockingIOError:  # another worker was quicker
            continue
        for _, kind, raw in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptor = array.array("i", raw[:4])[0]
                return socket.socket(fileno=descriptor)
        if not data:  # the controller is gone; pid 1 sees it too and ends everything
            os._exit(0)


def _serve(connection: socket.socket, wakeup: int) -> Command | None:
    """Carry out one job; returns its command if processes of it are still running."""
    with connection:
        try:
            job = Job(connection)
            if job.request.get("verb") == "exec":
                return _run_command(job, wakeup)
            files.serve(job)
        except (EOFError, ConnectionResetError):
            pass  # the controller hung up before it had said what it wanted, or in the middle of sending
        return None


def _run_command(job: Job, wakeup: int) -> Command | None:
    try:
        os.chdir(str(job.request["cwd"]))
    except OSError as error:
        job.fail(error, "exec", job.request["cwd"])
        return None
    try:
        command = Command.start(job.request, job.payload)
    except OSError as error:
        job.send(*refusal(error))
        return None
    finally:
        os.chdir("/")
    if _watch(job, command, wakeup):
        return command
    command.close()
    return None


def _watch(job: Job, command: Command, wakeup: int) -> bool:
    """Follow a command until its leader has ended, its deadline has passed, or the controller has hung up.

    Returns:
        Whether processes of it are still running.
    """
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(job.connection, select.POLLIN | select.POLLRDHUP)
    command.register(poll)
    while not command.ended:
        wait = command.time_left()
        # poll(2) takes an int of milliseconds; a distant deadline is looked at again
        events = dict(poll.poll(None if wait is None else max(0.0, min(wait, _LONGEST_WAIT) * 1000)))
        if wakeup in events:
            os.read(wakeup, 4096)
            command.reap()
        if job.connection.fileno() in events:
            command.kill_tree()
            return False
        command.handle(events, poll)
        command.check_deadline()
    command.drain()
    left_running = command.count_left_running()
    job.send(*command.report(left_running))
    return left_running > 0


def _outlive(command: Command, wakeup: int) -> None:
    """Keep a finished command's background processes reaped and their output flowing, until the last has ended."""
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    command.register(poll)
    while command.count_left_running():
        events = dict(poll.poll())
        if wakeup in events:
            os.read(wakeup, 4096)
        command.handle(events, poll)
