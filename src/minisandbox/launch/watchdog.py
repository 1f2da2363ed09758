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

from .disk import FLOOR, NEAR_FLOOR, Count, DiskLimit, Room, kept_in_memory, room
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
_HELD = (b"RssAnon", b"RssShmem", b"VmSwap")
_SHARED = (b"Pss_Anon", b"Pss_Shmem", b"SwapPss")


@dataclass(frozen=True, slots=True)
class _Process:
    """The memory use of a process, from /proc (proc_pid_status(5)).

    Attributes:
        parent: pid of its parent.
        waits: whether it is in an uninterruptible wait, for example for a child of vfork(2).
        held: bytes of its anonymous, shared and swapped-out memory.
    """

    parent: int
    waits: bool
    held: int


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
        self._suspects: frozenset[int] = frozenset()  # the processes of the check that exceeded the limit

    def wait(self) -> float:
        """Return the seconds until the next check is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self, ours: Collection[int]) -> None:
        """Check memory if a check is due; kill every process but ours if two checks in a row exceed the limit."""
        if self.wait():
            return
        started = time.process_time()
        # a short-lived child shares its parent's memory: the second check counts only processes of the first
        pids = [pid for pid in every_pid() if pid not in ours and (not self._suspects or pid in self._suspects)]
        near = sum(map(_resident, pids)) > self._limit  # a cheap upper bound: the exact check takes ten times as long
        too_much = near and self._is_too_much(pids)
        if too_much and self._suspects:
            self._counters.note_memory()  # before the kill: a worker reads the counter once its command has exited
            end_all(ours)
        self._suspects = frozenset(pids) if too_much and not self._suspects else frozenset()
        pause = (_SHARE_NEAR if near else _SHARE) * (time.process_time() - started)
        pause = min(max(INTERVAL, pause), LONGEST_INTERVAL)
        self._due = time.monotonic() + (_CONFIRMATION if self._suspects else pause)

    def _is_too_much(self, pids: Collection[int]) -> bool:
        processes = {pid: found for pid in pids if (found := _read(pid))}
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
        self._settling = False  # the next count must not kill again for files of killed commands
        self._begin()

    def wait(self) -> float:
        """Return the seconds until the next check is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self, ours: Collection[int]) -> None:
        """Check the disk if a check is due; kill every process but ours if the upper is too large or the disk full."""
        if self.wait():
            return
        free = room(self._limit.upper)
        if free.bytes < FLOOR:
            self._end(ours)
        elif time.monotonic() >= (self._count_due_near if (near := self._limit.is_near()) else self._count_due):
            self._go_on(ours, _SLICE_NEAR if near else _SLICE, free)
        self._due = time.monotonic() + INTERVAL

    def _begin(self) -> None:
        self._count = Count(self._limit.upper)
        self._steps = self._count.steps()
        self._room = room(self._limit.upper)
        self._took = 0.0

    def _go_on(self, ours: Collection[int], seconds: float, free: Room) -> None:
        """Count for a slice of time, and kill commands if the files counted so far exceed the limit."""
        started, over = time.monotonic(), False
        for _ in self._steps:
            if time.monotonic() > started + seconds:
                break
        else:
            over = True
        self._took += time.monotonic() - started
        limit = self._limit
        allowed = min(limit.allowed, limit.counted) if free.bytes < NEAR_FLOOR and limit.counted else limit.allowed
        size = self._count.bytes + kept_in_memory()
        too_much = size > allowed and not self._settling
        if over:
            limit.note_count(size, self._room)
            now = time.monotonic()
            self._count_due = now + max(_COUNTS_APART, _COUNT_SHARE * self._took)
            self._count_due_near = now + _COUNT_SHARE_NEAR * self._took
            self._settling = False
            self._begin()
        if too_much:
            self._end(ours)

    def _end(self, ours: Collection[int]) -> None:
        self._limit.note_ended()  # before the kill: a worker reads the counter once its command has exited
        end_all(ours)
        self._settling = True
        self._count_due = self._count_due_near = 0.0
        self._begin()


def end_all(ours: Collection[int]) -> None:
    """Kill every process of the sandbox but ours. Stop all of them first, so that none can fork during the kills."""
    if os.getpid() != 1:  # outside a process namespace, kill(-1) would reach every process of the machine
        raise RuntimeError("not the first process of a sandbox")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    for pid in every_pid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT if pid in ours else signal.SIGKILL)


def _resident(pid: int) -> int:
    """Return the resident bytes of a process, mapped files included (proc_pid_statm(5))."""
    try:
        table = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = int(os.read(table, 128).split()[1])
        finally:
            os.close(table)
    except OSError:  # the process has exited
        return 0
    if pages:
        return pages * _PAGE
    return _held(pid)  # its main thread has exited, but others may run


def _held(pid: int) -> int:
    process = _read(pid)
    return process.held if process else 0


def _read(pid: int) -> _Process | None:
    """Read the memory use of a process; return None if it has exited."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = _rows(f"/proc/{pid}/status")
        if _HELD[0] not in rows:  # its main thread has exited; another thread shows the memory
            rows |= _rows(f"/proc/{pid}/task/{max(map(int, os.listdir(f'/proc/{pid}/task')))}/status")
        return _Process(int(rows[b"PPid"]), rows[b"State"].startswith(b"D"), _sum(rows, _HELD))
    return None


def _vforked(processes: dict[int, _Process]) -> set[int]:
    """Return the children of vfork(2): at most one per waiting parent, with the same memory use as the parent."""
    children: dict[int, int] = {}
    for pid, process in processes.items():
        parent = processes.get(process.parent)
        if parent and parent.waits and parent.held == process.held:
            children[process.parent] = pid
    return set(children.values())


def _share(pid: int) -> int:
    """Return a process's proportional share of its memory, or all of its memory if the kernel hides the share."""
    with contextlib.suppress(OSError, KeyError):
        return _sum(_rows(f"/proc/{pid}/smaps_rollup"), _SHARED)
    return _held(pid)  # read again: a process that has exited meanwhile counts as 0


def _rows(path: str) -> dict[bytes, bytes]:
    with open(path, "rb") as source:
        pairs = (line.partition(b":") for line in source)
        return {name: value.strip() for name, _, value in pairs}


def _sum(rows: dict[bytes, bytes], names: tuple[bytes, ...]) -> int:
    return sum(int(rows[name].split()[0]) for name in names) * 1024
