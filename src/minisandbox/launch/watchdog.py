"""Enforce limits from pid 1: memory if there are no control groups, and disk if the upper lies on one.

The memory limit is best effort: processes can allocate more between two checks, so RLIMIT_DATA bounds each of them too
(:mod:`minisandbox.sandbox.plans`). Only memory that a process maps at the time of the check counts. Swapped-out memory
counts only once resident memory exceeds the limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

from .disk import FLOOR, NEAR_FLOOR, Count, DiskLimit, FreeSpace, free_space_of, tmpfs_usage
from .jobs.descendants import every_pid
from .kernel.cgroups import LimitCounters

INTERVAL, LONGEST_INTERVAL = 0.1, 2.0
"""Minimum and maximum seconds between two checks while commands run."""
_SHARE, _SHARE_NEAR = 150, 20
"""The pause after a check is this multiple of the check's CPU time; the second value applies near the limit.

So checks take well under 1 % of a CPU, and 5 % while resident memory exceeds the limit.
"""
_CONFIRMATION = 0.05
"""Seconds until a second check confirms that the limit is exceeded."""
_SLICE, _SLICE_NEAR = 0.005, 0.05
"""Seconds that one check counts files; the second value applies near the limit."""
_COUNTS_APART, _COUNT_SHARE, _COUNT_SHARE_NEAR = 1.0, 50, 4
"""Pause between two counts: at least the first value in seconds, and the second as a multiple of the last count's
duration. Near the limit, the pause is the third as a multiple of that duration."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEMORY_ROWS = (b"RssAnon", b"RssShmem", b"VmSwap")
_SHARED_ROWS = (b"Pss_Anon", b"Pss_Shmem", b"SwapPss")


@dataclass(frozen=True, slots=True)
class _Process:
    """The memory use of a process, from /proc (proc_pid_status(5)).

    Attributes:
        parent: pid of its parent.
        is_waiting: whether it is in an uninterruptible wait, for example for a child of vfork(2).
        memory: bytes of its anonymous, shared and swapped-out memory.
    """

    parent: int
    is_waiting: bool
    memory: int


class Watchdog:
    """Kills the commands of a sandbox if they exceed its memory limit.

    Args:
        limit: bytes that all processes together may hold, without the page cache of files.
        counters: counters in which an excess is recorded before any process is killed.
    """

    def __init__(self, limit: int, counters: LimitCounters) -> None:
        self._limit = limit
        self._counters = counters
        self._due = 0.0
        self._suspects: frozenset[int] = frozenset()  # processes of the last check, if it exceeded the limit

    def wait(self) -> float:
        """Return the seconds until the next check is due."""
        return max(0.0, self._due - time.monotonic())

    def check(self, own_pids: Collection[int]) -> None:
        """Check memory if a check is due; kill every process but ours if two checks in a row exceed the limit."""
        if self.wait():
            return
        start_time = time.process_time()
        # in the second check, count only processes of the first, because a short-lived child shares its parent's memory
        pids = [pid for pid in every_pid() if pid not in own_pids and (not self._suspects or pid in self._suspects)]
        # compare a cheap upper bound first, because the exact check takes ten times as long
        is_near = sum(map(_resident, pids)) > self._limit
        is_over_limit = is_near and self._exceeds_limit(pids)
        if is_over_limit and self._suspects:
            # count before the kill, because workers read the counter once their command has exited
            self._counters.note_memory()
            end_all(own_pids)
        self._suspects = frozenset(pids) if is_over_limit and not self._suspects else frozenset()
        pause = (_SHARE_NEAR if is_near else _SHARE) * (time.process_time() - start_time)
        pause = min(max(INTERVAL, pause), LONGEST_INTERVAL)
        self._due = time.monotonic() + (_CONFIRMATION if self._suspects else pause)

    def _exceeds_limit(self, pids: Collection[int]) -> bool:
        processes = {pid: process for pid in pids if (process := _read(pid))}
        for pid in _vforked(processes):  # before execve(2) it uses its parent's memory
            del processes[pid]
        return sum(map(_share, processes)) > self._limit


class DiskWatchdog:
    """Kills the commands of a sandbox if they exceed the size limit of its upper on disk.

    Each check counts a slice of the files. That takes at most 2 % of a CPU, or 20 % if the drop in free space suggests
    that the limit is near. Files stay after a kill, and later commands may remove them: commands are killed again only
    if the upper has grown since the last count. A count misses deleted files that are still open; the floors of free
    space (:data:`.disk.FLOOR`) bound those.

    Args:
        limit: limit of the upper.
    """

    def __init__(self, limit: DiskLimit) -> None:
        self._limit = limit
        self._due = self._count_due = self._count_due_near = 0.0
        self._is_settling = False  # whether the next count must not kill again for files of killed commands
        self._begin()

    def wait(self) -> float:
        """Return the seconds until the next check is due."""
        return max(0.0, self._due - time.monotonic())

    def check(self, own_pids: Collection[int]) -> None:
        """Check the disk if a check is due; kill every process but ours if the upper is too large or the disk full."""
        if self.wait():
            return
        free_space = free_space_of(self._limit.upper)
        if free_space.bytes < FLOOR:
            self._end(own_pids)
        elif time.monotonic() >= (self._count_due_near if (is_near := self._limit.is_near()) else self._count_due):
            self._continue_count(own_pids, _SLICE_NEAR if is_near else _SLICE, free_space)
        self._due = time.monotonic() + INTERVAL

    def _begin(self) -> None:
        self._count = Count(self._limit.upper)
        self._steps = self._count.steps()
        self._start_free_space = free_space_of(self._limit.upper)
        self._count_duration = 0.0

    def _continue_count(self, own_pids: Collection[int], seconds: float, free_space: FreeSpace) -> None:
        """Count for a slice of time, and kill commands if the files counted so far exceed the limit."""
        start_time, is_complete = time.monotonic(), False
        for _ in self._steps:
            if time.monotonic() > start_time + seconds:
                break
        else:
            is_complete = True
        self._count_duration += time.monotonic() - start_time
        limit = self._limit
        allowed_size = limit.allowed_size
        if free_space.bytes < NEAR_FLOOR and limit.counted_size:
            allowed_size = min(allowed_size, limit.counted_size)
        size = self._count.bytes + tmpfs_usage()
        is_over_limit = size > allowed_size and not self._is_settling
        if is_complete:
            limit.note_count(size, self._start_free_space)
            now = time.monotonic()
            self._count_due = now + max(_COUNTS_APART, _COUNT_SHARE * self._count_duration)
            self._count_due_near = now + _COUNT_SHARE_NEAR * self._count_duration
            self._is_settling = False
            self._begin()
        if is_over_limit:
            self._end(own_pids)

    def _end(self, own_pids: Collection[int]) -> None:
        # count before the kill, because workers read the counter once their command has exited
        self._limit.note_kill()
        end_all(own_pids)
        self._is_settling = True
        self._count_due = self._count_due_near = 0.0
        self._begin()


def end_all(own_pids: Collection[int]) -> None:
    """Kill every process of the sandbox but ours. Stop all of them first, so that none can fork during the kills."""
    if os.getpid() != 1:  # outside a process namespace, kill(-1) would reach every process of the machine
        raise RuntimeError("not the first process of a sandbox")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    for pid in every_pid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT if pid in own_pids else signal.SIGKILL)


def _resident(pid: int) -> int:
    """Return the resident bytes of a process, mapped files included (proc_pid_statm(5))."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as statm:
            pages = int(statm.read().split()[1])
    except OSError:  # the process has exited
        return 0
    if pages:
        return pages * _PAGE
    return _memory(pid)  # its main thread has exited, but others may run


def _memory(pid: int) -> int:
    process = _read(pid)
    return process.memory if process else 0


def _read(pid: int) -> _Process | None:
    """Read the memory use of a process; return None if it has exited."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = _rows(f"/proc/{pid}/status")
        if _MEMORY_ROWS[0] not in rows:  # its main thread has exited; another thread shows the memory
            rows |= _rows(f"/proc/{pid}/task/{max(map(int, os.listdir(f'/proc/{pid}/task')))}/status")
        return _Process(int(rows[b"PPid"]), rows[b"State"].startswith(b"D"), _sum(rows, _MEMORY_ROWS))
    return None


def _vforked(processes: dict[int, _Process]) -> set[int]:
    """Return the children of vfork(2): at most one per waiting parent, with the same memory use as the parent."""
    children: dict[int, int] = {}
    for pid, process in processes.items():
        parent = processes.get(process.parent)
        if parent and parent.is_waiting and parent.memory == process.memory:
            children[process.parent] = pid
    return set(children.values())


def _share(pid: int) -> int:
    """Return a process's proportional share of its memory, or all of its memory if the kernel hides the share."""
    with contextlib.suppress(OSError, KeyError):
        return _sum(_rows(f"/proc/{pid}/smaps_rollup"), _SHARED_ROWS)
    return _memory(pid)  # read again: a process that has exited meanwhile counts as 0


def _rows(path: str) -> dict[bytes, bytes]:
    with open(path, "rb") as file:
        pairs = (line.partition(b":") for line in file)
        return {name: value.strip() for name, _, value in pairs}


def _sum(rows: dict[bytes, bytes], names: tuple[bytes, ...]) -> int:
    return sum(int(rows[name].split()[0]) for name in names) * 1024
