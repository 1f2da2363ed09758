"""A limit of memory where there are no control groups: pid 1 looks at the sandbox's own processes.

It is weaker than the kernel's: between two looks a process can take more. What one process may take is therefore
limited by RLIMIT_DATA too (:mod:`minisandbox.sandbox.plans`). What /proc does not tell it cannot count: shared memory
of which nobody has the pages mapped at the moment, and the kernel's own (sockets, pipes, page tables).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from .jobs.descendants import every_pid, stat_fields
from .kernel import syscalls as sc
from .kernel.ledger import Ledger

INTERVAL = 0.05
"""Seconds between two looks while commands run, if looking is cheap."""
_SHARE, _LONGEST_INTERVAL = 20, 0.2
"""Looking takes this part of a processor; but seconds between two looks, however many processes there are."""
_LENT, _PAUSE = 0.5, 0.01
"""Seconds for which memory may be shown twice, and between two looks at it."""
_LONGEST_STOP = 0.2
"""Seconds that processes have to stop where none is to run: one that waits for a disk does not."""
_LONGEST_LOOK, _LONGEST_WAIT = 0.5, 5.0
"""Seconds of a processor, and seconds, after which what processes share is looked at no more."""
_OWN = (b"RssAnon:", b"VmSwap:"), (b"Pss_Anon:", b"SwapPss:")
_COMMON = (b"RssShmem:",), (b"Pss_Shmem:",)
_MESSAGE, _SEMAPHORE = 64, 64
"""Bytes that the kernel needs for each, besides a message's content (ipc/msgutil.c, ipc/sem.c).

What it makes room for is a power of two, and so up to twice a message.
"""


def pause_after(cost: float) -> float:
    """Seconds until the next look, after one that took ``cost`` seconds of a processor."""
    return min(max(INTERVAL, _SHARE * cost), _LONGEST_INTERVAL)


def enforce(limit: int, spared: Collection[int], ledger: Ledger) -> None:
    """End every process but those spared if together they hold more memory than they may.

    Args:
        limit: bytes of memory that is no file's.
        spared: our own.
        ledger: told before anything ends: a worker asks it as soon as its command has ended.
    """
    # what ended since it was looked at, and what it left is freed, must not count against who came after it
    if all(_is_too_much(limit) for _ in range(2)) and not _is_less_soon(limit):
        end_all(spared, ledger)


def _is_less_soon(limit: int) -> bool:
    """Whether it is no longer too much in a moment, where somebody waits for a child of vfork(2), as shells do.

    Until it executes something such a child uses its parent's memory, and /proc shows that for each of them. Code that
    has a thread wait so itself gains little time, and none beyond twice the limit.
    """
    end = time.monotonic() + _LENT
    while time.monotonic() < end and any(map(_waits, map(_place, every_pid()))) and not _is_too_much(2 * limit):
        time.sleep(_PAUSE)
        if not _is_too_much(limit):
            return True
    return not _is_too_much(limit)


def _waits(place: str) -> bool:
    """Whether a thread of a process is in a wait that no signal but SIGKILL ends."""
    with contextlib.suppress(OSError):  # it has ended
        threads = os.listdir(f"{place.partition('/task/')[0]}/task")
        return any(stat_fields(int(thread))[:1] == [b"D"] for thread in threads)
    return False


def _is_too_much(limit: int) -> bool:
    """Whether processes and what outlives them hold more than the limit."""
    kept = sum(thing.size for thing in _kept())
    # first a quick look, in which what several share counts for each, and everybody's shared memory is the sandbox's
    sizes = _sizes()
    if sum(sizes.values()) + kept + (_sum("/proc/meminfo", (b"Shmem:",)) or 0) <= limit:
        return False
    if _held(sizes, limit - kept) > limit - kept:
        return True
    # one that has ended since may have left what it held to a child that it forked, which lives no longer than a look
    if all(_sum(f"{place}/status", _OWN[0]) is not None for place, size in sizes.items() if size):
        return False
    with _standstill():
        return _held(_sizes(), limit - kept) > limit - kept


def _sizes() -> dict[str, int]:
    """What each process holds, by where it is shown; the youngest are looked at first, for they may end soonest."""
    youngest = _youngest()
    pids = sorted(every_pid(), key=lambda pid: (pid <= youngest, pid), reverse=True)  # numbers begin anew some day
    sizes = {place: _sum(f"{place}/status", _OWN[0]) for place in map(_place, pids)}
    for place in [place for place, size in sizes.items() if size is None]:
        if (thread := _other_thread(place)) is not None:
            sizes[thread] = _sum(f"{thread}/status", _OWN[0])
    return {place: size or 0 for place, size in sizes.items()}


def _youngest() -> int:
    """The number that was given last here (proc_loadavg(5))."""
    with open("/proc/loadavg", "rb") as source:
        return int(source.read().split()[4])


@contextlib.contextmanager
def _standstill() -> Iterator[None]:
    """Have no process but this one run, and none come or go, for as long as it takes."""
    before = set(filter(_is_stopped, every_pid()))
    _signal_all(signal.SIGSTOP)
    end = time.monotonic() + _LONGEST_STOP
    try:
        while not all(map(_is_still, every_pid())) and time.monotonic() < end:
            time.sleep(0.001)
        yield
    finally:
        for pid in every_pid():
            if pid not in before:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    return stat_fields(pid)[:1] == [b"T"]


def _is_still(pid: int) -> bool:
    """Whether a process is stopped, has ended, or waits for what no signal ends, as for a child of vfork(2)."""
    return pid == os.getpid() or stat_fields(pid)[:1] not in ([b"R"], [b"S"])


def _signal_all(number: int) -> None:
    """Send a signal to every process of the sandbox but this one, its first.

    A child that is being forked meanwhile gets it too, so that nothing outruns it (kernel/fork.c, copy_process).
    """
    if os.getpid() != 1:  # elsewhere it would be the machine's processes
        raise RuntimeError("not the first process of a sandbox")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def end_all(spared: Collection[int], ledger: Ledger) -> None:
    """End every process but those spared, and free what outlives them.

    Args:
        spared: our own.
        ledger: told before anything ends: a worker asks it as soon as its command has ended.
    """
    ledger.note_memory()
    _signal_all(signal.SIGSTOP)
    for pid in every_pid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT if pid in spared else signal.SIGKILL)
    _remove(_kept())


def _place(pid: int) -> str:
    """Where a process is shown."""
    return f"/proc/{pid}"


def _other_thread(place: str) -> str | None:
    """Where a process is shown whose first thread has ended: it shows no memory then, though others use it still."""
    with contextlib.suppress(OSError):  # it has ended
        threads = sorted(os.listdir(f"{place}/task"), key=int)
        for thread in threads if len(threads) > 1 else ():
            if _sum(f"{place}/task/{thread}/status", _OWN[0]) is not None:
                return f"{place}/task/{thread}"
    return None


def _held(places: Collection[str], allowed: int) -> int:
    """Bytes of processes together; of what several have in common, such as copies on write, the share of each only.

    Not every process shows that: one that is not dumpable, or another user's, counts as a whole. So do those that
    decide nothing any more, and those that are left when it has taken too long, the smallest: areas and descriptors
    without number would keep us looking.
    """
    begun = time.process_time(), time.monotonic()

    def late() -> bool:
        return time.process_time() - begun[0] > _LONGEST_LOOK or time.monotonic() - begun[1] > _LONGEST_WAIT

    wholes = {place: _whole(place) for place in places}
    own = common = 0
    rest = sum(map(sum, wholes.values()))
    for place in sorted(wholes, key=lambda place: sum(wholes[place]), reverse=True):
        undecided = allowed - rest < own + common <= allowed
        shares: tuple[int, ...] = wholes[place]
        if undecided and not late():  # one that has ended since then holds nothing any more
            shares = _shares(place) or _whole(place)
        own, common, rest = own + shares[0], common + shares[1], rest - sum(wholes[place])
    return own + max(common, _nameless(places, late))


def _whole(place: str) -> tuple[int, int]:
    """Bytes of a process, and of the memory that it shares by agreement, as if nobody else had them."""
    own, common = _sums(f"{place}/status", (_OWN[0], _COMMON[0])) or (0, 0)
    return own, common


def _shares(place: str) -> tuple[int, int] | None:
    """As :func:`_whole`, the share of what several have in common; None where a process does not show that."""
    found = _sums(f"{place}/smaps_rollup", (_OWN[1], _COMMON[1], (b"Anonymous:",)))
    if found is None:
        return None
    own, common, mapped = found
    if _waits(place):
        # arguments of execve(2) lie in no area of memory until it is done, and it waits for all other threads to end
        own += max(0, (_sum(f"{place}/status", (b"RssAnon:",)) or 0) - mapped)
    return own, common


def _nameless(places: Collection[str], late: Callable[[], bool]) -> int:
    """Bytes of files in memory that have no names (memfd_create(2)), mapped or not; all there is if it gets late."""
    sizes: dict[int, int] = {}
    for place in places:
        with contextlib.suppress(OSError):  # it has ended, or does not show them
            for name in os.listdir(f"{place}/fd"):
                if late():
                    return _sum("/proc/meminfo", (b"Shmem:",)) or 0
                path = f"{place}/fd/{name}"
                with contextlib.suppress(OSError):  # just closed
                    if os.readlink(path).startswith("/memfd:"):
                        status = os.stat(path)
                        sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _sum(path: str, names: tuple[bytes, ...]) -> int | None:
    """The sum of some rows of a table in bytes, or None if it does not have them."""
    found = _sums(path, (names,))
    return None if found is None else found[0]


def _sums(path: str, groups: tuple[tuple[bytes, ...], ...]) -> tuple[int, ...] | None:
    """The sums of groups of rows of a table in bytes, or None if it does not have them all."""
    try:
        with open(path, "rb") as source:
            lines = source.readlines()
    except OSError:
        return None
    rows = [[int(line.split()[1]) for line in lines if line.startswith(names)] for names in groups]
    if any(len(found) != len(names) for found, names in zip(rows, groups, strict=True)):
        return None
    return tuple(sum(found) * 1024 for found in rows)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A System V object: it stays when its makers end.

    Attributes:
        kind: ``shm``, ``msg`` or ``sem``.
        number: its id.
        maker: who may remove it.
        size: bytes of memory.
    """

    kind: str
    number: int
    maker: int
    size: int


def _kept() -> Iterator[_Kept]:
    """What there is of the sandbox's own (sysvipc(7)); a segment counts once more for who has it mapped."""
    for kind in ("shm", "msg", "sem"):
        try:
            with open(f"/proc/sysvipc/{kind}", "rb") as source:
                rows = [[int(field) for field in line.split()] for line in source.readlines()[1:]]
        except OSError:  # a kernel without them
            continue
        for row in rows:
            if kind == "shm":
                yield _Kept(kind, row[1], row[9], row[14] + row[15])
            elif kind == "msg":
                yield _Kept(kind, row[1], row[9], 2 * (row[3] + row[4] * _MESSAGE))
            else:
                yield _Kept(kind, row[1], row[6], row[3] * _SEMAPHORE)


def _remove(kept: Iterator[_Kept]) -> None:
    """Free what no process holds any more; in a child, because only its maker may."""
    makers: dict[int, list[_Kept]] = {}
    for thing in kept:
        makers.setdefault(thing.maker, []).append(thing)
    for maker, things in makers.items():
        with contextlib.suppress(OSError):  # too many processes: the next look tries again
            if os.fork() == 0:
                _remove_as(maker, things)


def _remove_as(maker: int, things: list[_Kept]) -> None:
    try:
        os.setresuid(maker, maker, maker)
        for thing in things:
            with contextlib.suppress(OSError):
                sc.remove_kept_memory(thing.kind, thing.number)
    finally:
        os._exit(0)
