"""A worker: the process inside a sandbox that carries out one job at a time.

It takes a job's socket from the sandbox's control socket, reads one request frame from it, and answers on it. For a
command it is the subreaper (prctl(2)): all processes of the command, daemons included, stay its descendants. A deadline
or a hang-up ends the command's whole tree and nothing else. The worker runs with the same uid as the commands, but is
not dumpable, so that they cannot trace it or read its memory.
"""

from __future__ import annotations

import array
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterator

from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.cgroups import LimitCounters

from . import changes, files, frames, process, shell
from . import exec as commands
from .exec import Command
from .job import WorkerJob

_IDLE_PATIENCE = 1.0
FAILED = 70
"""Exit status of a worker that broke: a mistake of ours, or too few resources left to take a job."""

BUSY, IDLE, RETIRED = b"b", b"i", b"r"
"""Notes to pid 1: the worker took a job; waits for one; takes no other, because its command still runs."""
_NOTE = struct.Struct("=c3xI")


def read_notes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each note and the pid of the worker that sent it. Notes are written whole (pipe(7))."""
    yield from _NOTE.iter_unpack(data)


def main(
    control: socket.SocketType,
    door: socket.SocketType,
    notes: tuple[int, LimitCounters],
    rlimits: tuple[tuple[str, int], ...],
    *,
    primary: bool,
) -> None:
    """Serve jobs: the primary worker until the sandbox ends, an extra one just once. Never returns.

    Args:
        control: the socket on which jobs arrive; all workers of the sandbox wait on it.
        door: listening socket at which processes other than the owner bring jobs.
        notes: pipe for notes to pid 1 about this worker's state, and the counters of what limits refused.
        rlimits: (name without ``RLIMIT_``, value) pairs for this process and so for every command.
        primary: whether it stays after its first job.
    """
    pipe, counters = notes
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, value in rlimits:
        _limit(getattr(resource, f"RLIMIT_{name}"), value)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    while True:
        connection = _take_job(control, door)
        _note(pipe, BUSY)
        counters.mark()
        unfinished = _serve(connection, wakeup, pipe, counters)
        if unfinished is not None:
            _note(pipe, RETIRED)
            unfinished.outlive(wakeup)
        if unfinished is not None or not primary:
            os._exit(0)
        _note(pipe, IDLE)


_REHEARSED: dict[str, object] = {
    "verb": "exec", "argv": ["nothing"], "env": [], "cwd": "/", "user": None, "timeout": None, "stdin": False,
    "output": 1,
}  # fmt: skip


def rehearse(counters: LimitCounters) -> None:
    """Serve a nonexistent command ahead of the first real one, to warm up."""
    asking, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with asking, connection:
        asking.sendall(frames.encode(_REHEARSED))
        counters.mark()
        commands.rehearse(WorkerJob(connection, counters), wakeup)
    os.close(wakeup)
    os.close(wakeup_write)


def _note(notes: int, note: bytes) -> None:
    os.write(notes, _NOTE.pack(note, os.getpid()))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _take_job(control: socket.SocketType, door: socket.SocketType) -> socket.socket:
    """Wait for a job's socket; several workers may wait for the same.

    A worker that is not needed for a while ends, so that an idle sandbox is one process; pid 1 forks another in time.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(door, select.POLLIN)
    while True:
        events = dict(poll.poll(_IDLE_PATIENCE * 1000))
        if not events:
            os._exit(0)
        try:
            if control.fileno() not in events:
                return _job_socket(_accept(door))
            flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            data, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(4), flags)
        except BlockingIOError:  # another worker was quicker
            continue
        for _, kind, raw in ancillary:
            if kind == socket.SCM_RIGHTS:
                return _job_socket(array.array("i", raw[:4])[0])
        if not data:  # the controller is gone; pid 1 sees it too and ends everything
            os._exit(0)


def _job_socket(descriptor: int) -> socket.socket:
    """Return a job's socket. With family and kind given, Python need not ask the kernel for them."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=descriptor)


def _accept(door: socket.SocketType) -> int:
    """Accept a connection: pid 1 has the interpreter's own type of socket, which is small and lacks accept()."""
    descriptor: int = door._accept()[0]  # type: ignore[attr-defined] # not in the stubs
    return descriptor


def _serve(connection: socket.socket, wakeup: int, notes: int, counters: LimitCounters) -> Command | None:
    """Carry out one job; returns its command if processes of it are still running.

    A process or a shell stays for as long as it likes: its worker takes no other job, and ends with it.
    """
    with connection:
        try:
            job = WorkerJob(connection, counters)
            verb = job.request.get("verb")
            if verb == "exec":
                return commands.serve(job, wakeup)
            if verb in ("start", "shell"):
                _note(notes, RETIRED)
                (process if verb == "start" else shell).serve(job, wakeup)
                os._exit(0)
            if verb == "changes":
                changes.serve(job)
                return None
            files.serve(job)
        except (EOFError, ConnectionResetError):
            pass  # the controller hung up before its request was complete
        return None
