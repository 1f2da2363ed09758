"""A worker: a process inside the sandbox that serves one job at a time.

The worker receives a job's socket over the sandbox's control socket, reads one request frame from it, and answers on
it. The worker is the subreaper (prctl(2)) of its command, so all processes of the command, daemons included, stay its
descendants. A timeout or a hang-up kills the command's process tree and nothing else. The worker runs with the same uid
as the commands, but is not dumpable, so that they cannot trace it or read its memory.
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
from .exec import Command, OutputPipes
from .job import WorkerJob

_IDLE_PATIENCE = 1.0
FAILED = 70
"""Exit status of a worker that failed, because of a bug or because it lacked the resources to take a job."""

BUSY, IDLE, RETIRED = b"b", b"i", b"r"
"""Notes to pid 1: the worker has taken a job, waits for a job, or takes no more jobs because its command still runs."""
_NOTE = struct.Struct("=c3xI")


def read_notes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each note and the pid of the worker that sent it. Writes to a pipe are atomic at this size (pipe(7))."""
    yield from _NOTE.iter_unpack(data)


def main(
    control: socket.SocketType,
    job_listener: socket.SocketType,
    notes: tuple[int, LimitCounters],
    rlimits: tuple[tuple[str, int], ...],
    *,
    primary: bool,
) -> None:
    """Serve jobs: the primary worker until the sandbox ends, any other worker just one. Never returns.

    Args:
        control: the socket on which jobs arrive; all workers of the sandbox wait on it.
        job_listener: listening socket on which processes other than the owner submit jobs.
        notes: pipe for notes to pid 1 about this worker's state, and the counters of limits that commands hit.
        rlimits: (name without ``RLIMIT_``, value) pairs for this process, which every command inherits.
        primary: whether to serve further jobs after the first.
    """
    notes_pipe, counters = notes
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, value in rlimits:
        _limit(getattr(resource, f"RLIMIT_{name}"), value)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    output_pipes = OutputPipes()
    while True:
        connection = _take_job(control, job_listener)
        _note(notes_pipe, BUSY)
        counters.mark()
        output_pipes.prepare()
        running_command = _serve(connection, wakeup, notes_pipe, counters, output_pipes)
        if running_command is not None:
            _note(notes_pipe, RETIRED)
            running_command.outlive(wakeup)
        if running_command is not None or not primary:
            os._exit(0)
        _note(notes_pipe, IDLE)


_REHEARSED: dict[str, object] = {
    "verb": "exec", "argv": ["nothing"], "env": [], "cwd": "/", "user": None, "timeout": None, "stdin": False,
    "output": 1,
}  # fmt: skip


def rehearse(counters: LimitCounters) -> None:
    """Serve a nonexistent command, so that memory pages are copied before the first real command."""
    client, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with client, connection:
        client.sendall(frames.encode(_REHEARSED))
        counters.mark()
        output_pipes = OutputPipes()
        output_pipes.prepare()
        commands.rehearse(WorkerJob(connection, counters), wakeup, output_pipes)
    os.close(wakeup)
    os.close(wakeup_write)


def _note(notes: int, note: bytes) -> None:
    os.write(notes, _NOTE.pack(note, os.getpid()))


def _limit(kind: int, value: int) -> None:
    _, hard_limit = resource.getrlimit(kind)
    if hard_limit != resource.RLIM_INFINITY:
        value = min(value, hard_limit)
    resource.setrlimit(kind, (value, value))


def _take_job(control: socket.SocketType, job_listener: socket.SocketType) -> socket.socket:
    """Wait for a job's socket, possibly in competition with other workers.

    An idle worker exits after a while, so that an idle sandbox is a single process. Pid 1 forks a worker for the next
    job.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(job_listener, select.POLLIN)
    while True:
        events = dict(poll.poll(_IDLE_PATIENCE * 1000))
        if not events:
            os._exit(0)
        try:
            if control.fileno() not in events:
                return _job_socket(_accept(job_listener))
            flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            data, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(4), flags)
        except BlockingIOError:  # another worker took the job
            continue
        for _, kind, packed_descriptor in ancillary:
            if kind == socket.SCM_RIGHTS:
                return _job_socket(array.array("i", packed_descriptor[:4])[0])
        if not data:  # the controller has hung up; pid 1 ends the sandbox
            os._exit(0)


def _job_socket(descriptor: int) -> socket.socket:
    """Return the socket of a descriptor. The explicit family and type save Python two system calls."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=descriptor)


def _accept(job_listener: socket.SocketType) -> int:
    """Accept a connection. The listener is a plain ``SocketType``, which takes less memory but lacks accept()."""
    descriptor: int = job_listener._accept()[0]  # type: ignore[attr-defined] # not in the stubs
    return descriptor


def _serve(
    connection: socket.socket, wakeup: int, notes: int, counters: LimitCounters, output_pipes: OutputPipes
) -> Command | None:
    """Serve one job; return its command if the command's background processes are still running, else None.

    A process or a shell occupies its worker until it ends; the worker then exits.
    """
    with connection:
        try:
            job = WorkerJob(connection, counters)
            verb = job.request.get("verb")
            if verb == "exec":
                return commands.serve(job, wakeup, output_pipes)
            output_pipes.close()
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
