"""Run the first process and the jobs of a container of another engine (:mod:`minisandbox.sandbox.engines`).

The engine isolates the container; this module does not. A job speaks the worker protocol on standard input and output,
because ``podman exec`` and ``docker exec`` connect no other descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time

from .jobs import worker
from .kernel import syscalls as sc
from .kernel.cgroups import LimitCounters

READY = b"ready\n"
"""The line that the first process prints once it has started."""
_PIECE = 1 << 16
_LONGEST_WAIT = 3600.0


def main() -> None:
    """Run the first process (``first SECONDS``) or one job (``job RLIMITS``) of a container. Never returns."""
    verb, argument = sys.argv[1:]
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    if verb == "first":
        _first(float(argument))
    _job(tuple((name, value) for name, value in json.loads(argument).items()))


def _first(lifetime: float) -> None:
    """Reap orphans until the owner closes standard input or the lifetime has passed. Exiting ends the container.

    Args:
        lifetime: seconds; 0: no limit.
    """
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    os.write(1, READY)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    deadline = time.monotonic() + lifetime if lifetime else float("inf")
    while (remaining := deadline - time.monotonic()) > 0:
        if poll.poll(min(remaining, _LONGEST_WAIT) * 1000) and not os.read(0, _PIECE):
            break
    os._exit(0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _job(rlimits: tuple[tuple[str, int], ...]) -> None:
    """Fork a worker for one job, and relay bytes between the job's socket and the standard streams."""
    relay_end, worker_end = socket.socketpair()
    job_sender, job_receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(job_sender, [b"job"], [worker_end.fileno()])
    pid = os.fork()
    if pid == 0:
        try:
            _work(job_receiver, (relay_end, worker_end, job_sender), rlimits)
        finally:
            os._exit(worker.FAILED)
    for connection in (worker_end, job_sender, job_receiver):
        connection.close()
    threading.Thread(target=_carry_in, args=(relay_end,), daemon=True).start()
    with contextlib.suppress(OSError):  # the engine's client has closed standard output
        while chunk := relay_end.recv(_PIECE):
            _write(chunk)
    with contextlib.suppress(OSError):
        relay_end.shutdown(socket.SHUT_RDWR)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    os.waitpid(pid, 0)  # the worker also reaps the command's background processes
    os._exit(0)


def _work(
    job_receiver: socket.socket, relay_sockets: tuple[socket.socket, ...], rlimits: tuple[tuple[str, int], ...]
) -> None:
    for connection in relay_sockets:
        connection.close()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    jobs = socket.SocketType(fileno=job_receiver.detach())
    worker.main(jobs, jobs, (null, LimitCounters(None, disk="/")), rlimits, primary=False)


def _carry_in(relay_end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the worker has exited
        while chunk := os.read(0, _PIECE):
            relay_end.sendall(chunk)
        relay_end.shutdown(socket.SHUT_WR)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
