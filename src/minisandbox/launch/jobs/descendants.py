"""Find, count and kill the processes below this one, through /proc.

A worker is the subreaper of its commands (prctl(2)), so daemonised processes stay below it too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

from minisandbox.launch.disk import DiskLimit, kept_in_memory, measure

KILL_PATIENCE = 10.0
"""Seconds after which a process that hangs in the kernel is left to the end of the sandbox."""
_STOP_PATIENCE = 2.0
_COLLECTING = 0.5
"""Seconds of reaping between two searches for a tree that forks: a search for many processes is slow."""
_ENDED = (b"Z", b"X")
"""States of a process whose first thread has ended (proc_pid_stat(5))."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def child_processes(pid: int) -> set[int]:
    """Return the live children of a process, from the parents that /proc names."""
    return set(_children().get(pid, ()))


def descendants(exclude: Collection[int] = ()) -> set[int]:
    """Return every live process below this one.

    Args:
        exclude: processes to leave out, with everything below them.
    """
    children = _children()
    pids: set[int] = set()
    queue = [os.getpid()]
    while queue:
        below = [pid for pid in children.get(queue.pop(), ()) if pid not in exclude]
        pids.update(below)
        queue += below
    return pids


def have_children() -> bool:
    """Return whether any process below this one exists; a subreaper is the parent of every orphan."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def stop_all(exclude: Collection[int] = ()) -> None:
    """Stop every process below this one, also those that appear meanwhile.

    A tree that forks faster than it can be searched would outrun the kills otherwise.
    """
    give_up = time.monotonic() + _STOP_PATIENCE
    stopped: set[int] = set()
    while (fresh := descendants(exclude) - stopped) and time.monotonic() < give_up:
        signal_all(fresh, signal.SIGSTOP)
        stopped |= fresh


def kill_all(reap: Callable[[], bool], exclude: Collection[int] = ()) -> None:
    """End everything below this process.

    All of it is stopped first, so that nothing runs on between the first and the last kill.

    Args:
        reap: collects some children that have ended, and says whether there may be more.
        exclude: processes that stay alive, with everything below them.
    """
    stop_all(exclude)
    # an excluded process may create orphans without end
    give_up = time.monotonic() + (_STOP_PATIENCE if exclude else KILL_PATIENCE)
    while time.monotonic() < give_up:
        doomed = descendants(exclude)
        signal_all(doomed, signal.SIGKILL)
        look_again = min(time.monotonic() + _COLLECTING, give_up)
        while reap() and time.monotonic() < look_again:
            pass
        if not have_children() or (exclude and not doomed):
            return
        time.sleep(0.0005)


def signal_all(pids: Collection[int], number: int) -> None:
    """Signal processes; ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> dict[int, list[int]]:
    """Return the live processes of this sandbox by their parents."""
    children: dict[int, list[int]] = {}
    for pid in every_pid():
        state, parent, *_ = stat_fields(pid) or (b"X", b"0")
        if not has_ended(pid, state):
            children.setdefault(int(parent), []).append(pid)
    return children


def has_ended(pid: int, state: bytes) -> bool:
    """Return whether a process has exited. If only its first thread has, it looks like a zombie and runs on (proc(5)).

    Args:
        pid: of the process.
        state: the first of :func:`stat_fields`.
    """
    if state not in _ENDED:
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    return True


def every_pid() -> list[int]:
    """Return every process that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on (proc_pid_stat(5)); none if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            return source.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def usage(upper: DiskLimit | None = None) -> dict[str, float]:
    """Return what the sandbox uses: CPU seconds, bytes of memory and of disk, processes of its commands.

    Disk is counted on the sandbox's memory, which holds its upper (unless that is on disk), /run and /dev/shm.

    Args:
        upper: its disk upper, which counts too.
    """
    cpu = memory = processes = 0
    for pid in every_pid():
        fields = stat_fields(pid)
        if not fields:  # the process has just exited
            continue
        # proc_pid_stat(5), from the state on: 1 is the parent; 11 to 14 CPU ticks; 21 resident pages
        cpu += sum(int(field) for field in fields[11:15])
        memory += int(fields[21]) * _PAGE
        # the children of pid 1 are workers: every command descends from one of them
        processes += pid != 1 and fields[1] != b"1" and not has_ended(pid, fields[0])
    disk = kept_in_memory() + (measure(upper.upper) if upper else 0)
    return {"cpu": cpu / _TICKS, "memory": memory, "disk": disk, "processes": processes}
