"""Limits that pid 1 watches: memory without control groups, and the disk if a sandbox's upper lies on one.

Memory is what the sandbox's own processes hold. Best effort: between two looks they can take more, so RLIMIT_DATA
bounds each of them too (:mod:`minisandbox.sandbox.plans`). Only memory that a process has mapped at the moment counts,
and swapped-out memory only once the resident one exceeds the limit.
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
"""Seconds between two looks while commands run: at least, and at most."""
_SHARE, _SHARE_NEAR = 150, 20
"""The pause after a look is so many times the processor time that the look took; less near the limit.

So looking takes well under 1 % of a processor, and 5 % where resident memory exceeds the limit.
"""
_CONFIRMATION = 0.05
"""Seconds until a second look confirms that there is too much."""
_SLICE, _SLICE_NEAR = 0.005, 0.05
"""Seconds that one look counts files; more if the limit may be near."""
_COUNTS_APART, _COUNT_SHARE, _COUNT_SHARE_NEAR = 1.0, 50, 4
"""The pause between two counts: at least so many seconds, and so many times what the last count took; near the limit
only the last."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HELD = (b"RssAnon", b"RssShmem", b"VmSwap")
_SHARED = (b"Pss_Anon", b"Pss_Shmem", b"SwapPss")


@dataclass(frozen=True, slots=True)
class _Process:
    """The memory use of a process, from /proc (proc_pid_status(5)).

    Attributes:
        parent: pid of its parent.
        waits: whether it is in a wait that only SIGKILL ends, such as for a child of vfork(2).
        held: bytes of memory of its own and of memory that it shares.
    """

    parent: int
    waits: bool
    held: int


class Watchdog:
    """Ends the commands of a sandbox that hold more memory than they may.

    Args:
        limit: bytes that all processes together may hold, files not counted.
        counters: where an excess is noted before anything ends.
    """

    def __init__(self, limit: int, counters: LimitCounters) -> None:
        self._limit = limit
        self._counters = counters
        self._due = 0.0
        self._suspects: frozenset[int] = frozenset()  # all that were there when the last look found too much

    def wait(self) -> float:
        """Return the seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self, ours: Collection[int]) -> None:
        """Look, if it is time to; end every process but ours if two looks in a row find too much."""
        if self.wait():
            return
        started = time.process_time()
        # children that come and go share their parent's memory: only who is there at both looks counts at the second
        pids = [pid for pid in every_pid() if pid not in ours and (not self._suspects or pid in self._suspects)]
        near = sum(map(_resident, pids)) > self._limit  # rarely true; the exact check takes ten times as long
        too_much = near and self._is_too_much(pids)
        if too_much and self._suspects:
            self._counters.note_memory()  # first: a worker reads it as soon as its command has ended
            end_all(ours)
        self._suspects = frozenset(pids) if too_much and not self._suspects else frozenset()
        pause = (_SHARE_NEAR if near else _SHARE) * (time.process_time() - started)
        pause = min(max(INTERVAL, pause), LONGEST_INTERVAL)
        self._due = time.monotonic() + (_CONFIRMATION if self._suspects else pause)

    def _is_too_much(self, pids: Collection[int]) -> bool:
        processes = {pid: found for pid in pids if (found := _read(pid))}
        for pid in _vforked(processes):  # until it executes something, its memory is its parent's
            del processes[pid]
        return sum(map(_share, processes)) > self._limit


class DiskWatchdog:
    """Ends the commands of a sandbox that write more to its upper on disk than they may.

    It counts files, a slice in each look. That takes 2 % of a processor at most, or 20 % if the file system's free
    space says that the limit may be near. What lies there when commands were ended stays, and may be removed: a command
    is ended only if there is more than at the count before. Files that were deleted and are still open are not counted:
    the floors hold these.

    Args:
        limit: what may be written.
    """

    def __init__(self, limit: DiskLimit) -> None:
        self._limit = limit
        self._due = self._count_due = self._count_due_near = 0.0
        self._settling = False  # the next count finds what killed commands have left
        self._begin()

    def wait(self) -> float:
        """Return the seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self, ours: Collection[int]) -> None:
        """Look, if it is time to; end every process but ours if there is too much, or no room for more."""
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
        """Count for a while, and kill commands if the files counted so far exceed the limit."""
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
        self._limit.note_ended()  # first: a worker reads it as soon as its command has ended
        end_all(ours)
        self._settling = True
        self._count_due = self._count_due_near = 0.0
        self._begin()


def end_all(ours: Collection[int]) -> None:
    """End every process of the sandbox but ours; stopped first, none can outrun this with further children."""
    if os.getpid() != 1:  # elsewhere these would be the machine's processes
        raise RuntimeError("not the first process of a sandbox")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    for pid in every_pid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT if pid in ours else signal.SIGKILL)


def _resident(pid: int) -> int:
    """Return a process's resident bytes, those of files included (proc_pid_statm(5))."""
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
    return _held(pid)  # its first thread has ended, and others may live


def _held(pid: int) -> int:
    process = _read(pid)
    return process.held if process else 0


def _read(pid: int) -> _Process | None:
    """Read what a process holds; None if it has ended."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = _rows(f"/proc/{pid}/status")
        if _HELD[0] not in rows:  # its first thread has ended; others may live, and show its memory
            rows |= _rows(f"/proc/{pid}/task/{max(map(int, os.listdir(f'/proc/{pid}/task')))}/status")
        return _Process(int(rows[b"PPid"]), rows[b"State"].startswith(b"D"), _sum(rows, _HELD))
    return None


def _vforked(processes: dict[int, _Process]) -> set[int]:
    """Find children that share their parent's memory: one at most for each parent that waits, and equal to it."""
    children: dict[int, int] = {}
    for pid, process in processes.items():
        parent = processes.get(process.parent)
        if parent and parent.waits and parent.held == process.held:
            children[process.parent] = pid
    return set(children.values())


def _share(pid: int) -> int:
    """Return a process's share of the memory that it holds; all of it if the process does not show its share."""
    with contextlib.suppress(OSError, KeyError):
        return _sum(_rows(f"/proc/{pid}/smaps_rollup"), _SHARED)
    return _held(pid)  # read again: one that has ended since shows no share either, and holds nothing


def _rows(path: str) -> dict[bytes, bytes]:
    with open(path, "rb") as source:
        pairs = (line.partition(b":") for line in source)
        return {name: value.strip() for name, _, value in pairs}


def _sum(rows: dict[bytes, bytes], names: tuple[bytes, ...]) -> int:
    return sum(int(rows[name].split()[0]) for name in names) * 1024
