"""Stands between us and a program of the host, and ends it, with all that it has started, when we have ended.

A script, ``guard.py OWNER COMMAND...``: the owner is our pid. It is asked to end early by SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_PATIENCE = 5.0
"""Seconds for what does not die: it hangs in the kernel, or belongs to somebody else (sudo)."""


def main(owner: int, command: list[str]) -> int:
    """Run the command.

    Args:
        owner: pid of the process whose end is everybody's.
        command: the program and its arguments.

    Returns:
        Its exit status, which is 128 and the number where a signal ended it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # what goes into a session of its own (daemons of ssh, of credential helpers) stays below us
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != owner:  # it ended before
        return 1
    try:
        ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by this interpreter
        program = os.posix_spawnp(command[0], command, os.environ, setsigdef=ignored)
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        return status if status >= 0 else 128 - status
    finally:
        _end_all()


def _end_all() -> None:
    """End all that is below us, also what left our session: it would keep our output open."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    give_up = time.monotonic() + _PATIENCE
    with contextlib.suppress(ChildProcessError, FileNotFoundError):  # a kernel without CONFIG_PROC_CHILDREN
        while time.monotonic() < give_up:
            with open("/proc/thread-self/children", encoding="ascii") as listed:
                children = [int(pid) for pid in listed.read().split()]
            for child in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))  # nothing is left to do, which would take time
