"""A limit of memory where there are no control groups: pid 1 looks at the sandbox's own processes.

It is weaker than the kernel's: between two looks a process can take more. What one process may take is therefore
limited by RLIMIT_DATA too (:mod:`minisandbox.sandbox.plans`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Collection

from .descendants import every_pid

INTERVAL = 0.05
"""Seconds between two looks while commands run."""
_PAGE = resource.getpagesize()


def enforce(limit: int, spared: Collection[int]) -> bool:
    """End every process but those spared if together they hold more memory than they may.

    Args:
        limit: bytes of memory of their own: not shared, not of files.
        spared: our own.

    Returns:
        Whether they did.
    """
    used = sum(_own_memory(pid) for pid in every_pid())
    if used <= limit:
        return False
    for _ in range(2):  # one that was being forked shows the second time
        for pid in every_pid():
            if pid not in spared:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    return True


def _own_memory(pid: int) -> int:
    """Bytes that a process holds and no other: resident less shared (proc_pid_statm(5))."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as source:
            fields = source.read().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE
