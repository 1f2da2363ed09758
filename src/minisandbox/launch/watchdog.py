"""A limit of memory where there are no control groups: pid 1 looks at the sandbox's own processes.

It is weaker than the kernel's: between two looks a process can take more. What one process may take is therefore
limited by RLIMIT_DATA too (:mod:`minisandbox.sandbox.plans`). What /proc does not tell it cannot count: shared memory
of which nobody has the pages mapped at the moment, and the kernel's own (sockets, pipes, page tables).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from . import syscalls as sc
from .descendants import every_pid
from .ledger import Ledger

INTERVAL = 0.05
"""Seconds between two looks while commands run."""
_OWN = (b"RssAnon:", b"VmSwap:"), (b"Pss_Anon:", b"SwapPss:")
_COMMON = (b"RssShmem:",), (b"Pss_Shmem:",)
_MESSAGE, _SEMAPHORE = 64, 64
"""Bytes that the kernel needs for each, besides a message's content (ipc/msgutil.c, ipc/sem.c)."""


def enforce(limit: int, spared: Collection[int], ledger: Ledger) -> None:
    """End every process but those spared if together they hold more memory than they may.

    Args:
        limit: bytes of memory that is no file's.
        spared: our own.
        ledger: told before anything ends: a worker asks it as soon as its command has ended.
    """
    kept = sum(thing.size for thing in _kept())
    # first a quick look, in which what several share counts for each, and everybody's shared memory is the sandbox's
    sizes = {place: _sum(f"{place}/status", _OWN[0]) for place in map(_place, every_pid())}
    for place in [place for place, size in sizes.items() if size is None]:
        if (thread := _other_thread(place)) is not None:
            sizes[thread] = _sum(f"{thread}/status", _OWN[0])
    if sum(size or 0 for size in sizes.values()) + kept + (_sum("/proc/meminfo", (b"Shmem:",)) or 0) <= limit:
        return
    own = sum(_share(place, _OWN) for place in sizes)
    if own + kept + max(sum(_share(place, _COMMON) for place in sizes), _nameless(sizes)) <= limit:
        return
    end_all(spared, ledger)


def end_all(spared: Collection[int], ledger: Ledger) -> None:
    """End every process but those spared, and free what outlives them.

    Args:
        spared: our own.
        ledger: told before anything ends: a worker asks it as soon as its command has ended.
    """
    ledger.note_memory()
    for _ in range(2):  # one that was being forked shows the second time
        for pid in every_pid():
            if pid not in spared:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
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


def _share(place: str, names: tuple[tuple[bytes, ...], tuple[bytes, ...]]) -> int:
    """Bytes of a process; of what it has in common with others, such as copies on write, its share only.

    Not every process shows that: one that is not dumpable, or another user's, counts as a whole.
    """
    whole, share = names
    found = _sum(f"{place}/smaps_rollup", share)
    return _sum(f"{place}/status", whole) or 0 if found is None else found


def _nameless(places: Collection[str]) -> int:
    """Bytes of files in memory that have no names (memfd_create(2)), mapped or not."""
    sizes: dict[int, int] = {}
    for place in places:
        with contextlib.suppress(OSError):  # it has ended, or does not show them
            for name in os.listdir(f"{place}/fd"):
                path = f"{place}/fd/{name}"
                with contextlib.suppress(OSError):  # just closed
                    if os.readlink(path).startswith("/memfd:"):
                        status = os.stat(path)
                        sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _sum(path: str, names: tuple[bytes, ...]) -> int | None:
    """The sum of some rows of a table in bytes, or None if it does not have them."""
    try:
        with open(path, "rb") as source:
            rows = [line.split() for line in source if line.startswith(names)]
    except OSError:
        return None
    return sum(int(row[1]) for row in rows) * 1024 if len(rows) == len(names) else None


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
                yield _Kept(kind, row[1], row[9], row[3] + row[4] * _MESSAGE)
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
