"""The supervisor of a sandbox without the sandbox: pid 1's loop and the workers as ordinary processes of this machine.

It isolates nothing. It is for :mod:`minisandbox.testing`, whose fake is served by the very code that serves a
real sandbox. In the place of the kernel, which ends a process namespace with its first process, a guard ends everything
that descends from the fake when the loop or the fake's owner has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import time

from . import init, zygote
from .jobs import worker
from .jobs.descendants import child_processes
from .kernel import syscalls as sc
from .kernel.cgroups import LimitCounters

_CONTROL, _LIFELINE, _DOOR, _FIRST_FREE = 3, 4, 5, 6
_PATIENCE = 10.0


def main(control: int, door: int, owner: int, numbers: dict[str, int]) -> None:
    """Serve jobs until the owner hangs up or ends. Never returns.

    Args:
        control: socket on which jobs arrive.
        door: listening socket at which others bring jobs.
        owner: pidfd of the process whose fake this is.
        numbers: limits of commands, and the lifetime in milliseconds, as :mod:`.setup` gives them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    zygote.forbid_imports()
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    lifeline, lifeline_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(lifeline_write)
            _supervise(control, lifeline, door, numbers)
        finally:
            os._exit(worker.FAILED)
    for descriptor in (control, door, lifeline):
        os.close(descriptor)
    _guard(pid, owner)


def _supervise(control: int, lifeline: int, door: int, numbers: dict[str, int]) -> None:
    """Be to the fake what pid 1 is to a sandbox, with the descriptors at the numbers that it knows."""
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100) for descriptor in (control, lifeline, door)]
    for number, descriptor in enumerate(kept, _CONTROL):
        os.dup2(descriptor, number, inheritable=False)
    sc.close_range(_FIRST_FREE)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    jobs, outside = socket.SocketType(fileno=_CONTROL), socket.SocketType(fileno=_DOOR)
    jobs.send(json.dumps({"event": "born", "pid": os.getpid()}).encode())
    leader = init.Init(LimitCounters(None, disk="/"))
    leader.begin(numbers, jobs, outside)
    leader.serve()


def _guard(pid: int, owner: int) -> None:
    """Wait for the end of the supervisor or of the owner, then end whatever is left."""
    poll = select.poll()
    for descriptor in (os.pidfd_open(pid), owner):
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:  # what loses its parent becomes our child: the next round's
        for child in child_processes(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)
            continue
        os._exit(0)
    os._exit(1)
