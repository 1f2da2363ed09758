"""Run the loop of pid 1 and its workers as ordinary processes, without isolation, for :mod:`minisandbox.testing`.

When this supervisor has exited, a guard process kills every process below it, as the kernel does in a process
namespace.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket

from . import init, zygote
from .jobs import worker
from .jobs.descendants import child_processes
from .kernel import syscalls as sc
from .kernel.cgroups import LimitCounters

_CONTROL, _LIFELINE = 3, 4


def main(control: int, settings: dict[str, int]) -> None:
    """Serve jobs until the owner hangs up; then kill all remaining processes.

    Args:
        control: the descriptor of the socket on which jobs arrive.
        settings: limits of commands, and the lifetime in milliseconds, as :mod:`.setup` sends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    zygote.forbid_imports()
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    lifeline, lifeline_write = os.pipe2(os.O_CLOEXEC)
    supervisor = os.fork()
    if supervisor == 0:
        try:
            os.close(lifeline_write)
            _supervise(control, lifeline, settings)
        finally:
            os._exit(worker.FAILED)
    os.close(control)
    os.waitpid(supervisor, 0)
    while children := child_processes(os.getpid()):  # killing a process turns its children into ours
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _supervise(control: int, lifeline: int, settings: dict[str, int]) -> None:
    """Move the descriptors to the numbers that the loop of pid 1 expects, and run the loop."""
    for target, descriptor in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (control, lifeline)]):
        os.dup2(descriptor, _CONTROL + target, inheritable=False)
    sc.close_range(_LIFELINE + 1)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    listener, _connected = socket.socketpair()  # the job listener, to which nobody connects
    loop = init.Init(LimitCounters(None, disk="/"))
    loop.begin(settings, socket.SocketType(fileno=_CONTROL), listener)
    loop.serve()
