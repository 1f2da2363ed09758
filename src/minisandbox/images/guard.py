"""Stands between us and a program of the host, and ends it, with all that it has started, when we have ended.

A script, ``guard.py OWNER COMMAND...``: the owner is a pidfd of us. It is asked to end early by SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 5.0
"""Seconds for what does not die: it hangs in the kernel, or belongs to somebody else (sudo)."""


def main(owner: int, command: list[str]) -> int:
    """Run the command.

    Args:
        owner: pidfd of the process whose end is everybody's.
        command: the program and its arguments.

    Returns:
        Its exit status, which is 128 and the number where a signal ended it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # what goes into a session of its own (daemons of ssh, of credential helpers) stays below us (prctl(2))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(owner, False)
    try:
        ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by this interpreter, not by whoever asked
        program = os.posix_spawnp(command[0], command, os.environ, setsigdef=ignored)
        poll = select.poll()
        for descriptor in (owner, os.pidfd_open(program)):
            poll.register(descriptor, select.POLLIN)
        if owner in dict(poll.poll()):
            return 1
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        return status if status >= 0 else 128 - status
    finally:
        _end_all()


def _end_all() -> None:
    """End what is still below us: what is in nobody's session any more would keep our output open, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    give_up = time.monotonic() + _PATIENCE
    while _have_children() and time.monotonic() < give_up:
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def _have_children() -> bool:
    """Collect those that have ended; whether there are others."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _children() -> list[int]:
    with contextlib.suppress(FileNotFoundError), open("/proc/thread-self/children", encoding="ascii") as listed:
        return [int(pid) for pid in listed.read().split()]
    found = []  # a kernel without CONFIG_PROC_CHILDREN
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))  # nothing is left to do, which would take time
