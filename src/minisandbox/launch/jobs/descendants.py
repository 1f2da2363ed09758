"""Find, count and kill the processes below this one, through /proc.

A worker is the subreaper of its commands (prctl(2)), so daemonised processes stay its descendants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

from minisandbox.launch.disk import DiskLimit, measure, tmpfs_usage

KILL_PATIENCE = 10.0
"""Seconds to wait for killed processes; one that hangs in the kernel is left until the sandbox ends."""
_STOP_PATIENCE = 2.0
_COLLECTING = 0.5
"""Seconds of reaping between two searches for new processes, because a search through many processes is slow."""
_ENDED = (b"Z", b"X")
"""States of a process whose main thread has exited (proc_pid_stat(5))."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def child_processes(pid: int) -> set[int]:
    """Return the live children of a process."""
    return set(_children().get(pid, ()))


def descendants(exclude: Collection[int] = ()) -> set[int]:
    """Return every live descendant of this process.

    Args:
        exclude: processes to leave out, with all their descendants.
    """
    children = _children()
    pids: set[int] = set()
    queue = [os.getpid()]
    while queue:
        child_pids = [pid for pid in children.get(queue.pop(), ()) if pid not in exclude]
        pids.update(child_pids)
        queue += child_pids
    return pids


def have_children() -> bool:
    """Return whether this process has children. A subreaper without children has no descendants either."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def stop_all(exclude: Collection[int] = ()) -> None:
    """Stop every descendant of this process, including processes that are forked meanwhile.

    Otherwise, processes that fork faster than /proc can be searched would escape the kills.
    """
    deadline = time.monotonic() + _STOP_PATIENCE
    stopped_pids: set[int] = set()
    while (new_pids := descendants(exclude) - stopped_pids) and time.monotonic() < deadline:
        signal_all(new_pids, signal.SIGSTOP)
        stopped_pids |= new_pids


def kill_all(reap: Callable[[], bool], exclude: Collection[int] = ()) -> None:
    """Kill every descendant of this process.

    All processes are stopped first, so that none keeps running between the first and the last kill.

    Args:
        reap: reaps some exited children, and returns whether there may be more.
        exclude: processes that stay alive, with all their descendants.
    """
    stop_all(exclude)
    # set a shorter deadline for excluded processes, because they may create orphans forever
    deadline = time.monotonic() + (_STOP_PATIENCE if exclude else KILL_PATIENCE)
    while time.monotonic() < deadline:
        pids = descendants(exclude)
        signal_all(pids, signal.SIGKILL)
        next_search = min(time.monotonic() + _COLLECTING, deadline)
        while reap() and time.monotonic() < next_search:
            pass
        if not have_children() or (exclude and not pids):
            return
        time.sleep(0.0005)


def signal_all(pids: Collection[int], number: int) -> None:
    """Send a signal to processes; ignore processes that have exited."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> dict[int, list[int]]:
    """Return the live processes of this sandbox, grouped by parent."""
    children: dict[int, list[int]] = {}
    for pid in every_pid():
        state, parent, *_ = stat_fields(pid) or (b"X", b"0")
        if not has_ended(pid, state):
            children.setdefault(int(parent), []).append(pid)
    return children


def has_ended(pid: int, state: bytes) -> bool:
    """Return whether a process has exited.

    A process whose main thread has exited looks like a zombie, but its other threads may run (proc(5)).

    Args:
        pid: the process.
        state: the first field of :func:`stat_fields`.
    """
    if state not in _ENDED:
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    return True


def every_pid() -> list[int]:
    """Return the pid of every process that is visible in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on (proc_pid_stat(5)), or [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def usage(upper: DiskLimit | None = None) -> dict[str, float]:
    """Return the sandbox's resource use: CPU seconds, bytes of memory and of disk, processes of its commands.

    Disk use is the size of the sandbox's tmpfs, which holds /run, /dev/shm and an upper in memory, plus an upper on
    disk.

    Args:
        upper: limit of the upper on disk, or None.
    """
    cpu = memory = processes = 0
    for pid in every_pid():
        fields = stat_fields(pid)
        if not fields:  # the process has just exited
            continue
        # proc_pid_stat(5), from the state on: field 1 is the parent, 11 to 14 CPU ticks, 21 resident pages
        cpu += sum(int(field) for field in fields[11:15])
        memory += int(fields[21]) * _PAGE
        # leave out pid 1 and its children, the workers
        processes += pid != 1 and fields[1] != b"1" and not has_ended(pid, fields[0])
    disk = tmpfs_usage() + (measure(upper.upper) if upper else 0)
    return {"cpu": cpu / _TICKS, "memory": memory, "disk": disk, "processes": processes}
