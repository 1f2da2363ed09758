"""A limit of what the kernel holds for a sandbox and no other limit bounds: pid 1 looks from time to time.

Of sockets the kernel tells it (:mod:`.sockets`). An open directory of an overlay keeps a copy of its names as they were
when it was first read (fs/overlayfs/readdir.c), in memory that no account sees and nothing shows. What shows is that
the machine's such memory grows, how many directories are open here, and how many names there can be. File locks are
counted (:mod:`.filelocks`). So are semaphores: for each set and each process that wants its operations undone
(SEM_UNDO, semop(2)) the kernel keeps two bytes for each semaphore, and looks through all of them when it ends.

Small objects and page tables, which a control group is charged for, are limited because the kernel lets go of them one
by one: four million epoll watches or areas of memory keep processes that have been killed for five seconds, 230 MB of
tables full of pages, which may be the same few, for three.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from . import filelocks, watchdog
from .asking import sum_as_users
from .jobs.descendants import every_pid, may_hold, status_number
from .kernel import cgroups
from .kernel.ledger import Ledger
from .sockets import Sockets

INTERVAL = 0.2
"""Seconds between two looks while commands run."""
_SHARE, _LONGEST_PAUSE = 20, 3.0
"""Looking takes no more than this part of a processor; seconds between two looks, however long one took."""
_NAME = 512
"""Bytes for a name of 255 characters."""
_NAMES_BELOW = 20_000
"""Names of a large directory of the image or the host."""
_IN_FLIGHT = 4096
"""So many directories may be under way where descriptors are: nothing shows what they are of."""
_MOST_LOOKED_AT = 20_000
_MOST_UNDONE = 16_000_000
"""Semaphores of all sets, as often as there are processes: to end takes them 0.3 s of a processor; 32 MB."""
_SET = 48
"""A set counts as so many semaphores more."""
_MOST_NETLINK = 1000
"""Those that hear of changes are in one list of the machine, which is looked through whenever one of them is closed."""
_MOST_GROUPS = 4000
"""Of multicast: they are in one list, which is looked through whenever one of them is left."""
_MOST_SHARING = 256
"""Sockets at one port (SO_REUSEPORT): there is room for twice as many as there ever were, until the last one goes."""
_OBJECTS, _OBJECTS_SHARE = 256 << 20, 16
"""Bytes of small objects, and for tables of pages this part of the limit more: 1.3 million epoll watches."""
_FILE = 1024
"""Bytes of small objects for a file in memory, which last as long as it."""
_PROCESS = 64 << 10
"""Bytes for a process: its stack, its first pages' tables, what names it."""
_TABLES, _TABLES_SHARE = 96 << 20, 8
"""Bytes of page tables, and this part of the limit more: to go takes full ones 10 ms of a processor for each MB."""
_PAUSES = (0.0, 0.01, 0.02, 0.1)
"""Seconds before each of several looks: a program that begins may show nothing until a busy machine lets it go on."""
_PATIENCE, _MOST_WAITS = 0.2, 20
"""Seconds of each wait for objects to be given back, and how many there are."""


class KernelMemory:
    """What one sandbox has of it.

    Args:
        limit: bytes that its sockets may hold, and that its open directories may.
        sockets: those of its network namespace, or None where that is the host's.
        locks: the lists of file locks (:func:`.filelocks.open_lists`).
        objects: what counts its control group's small objects, if it has one.
    """

    def __init__(
        self, limit: int, sockets: Sockets | None, locks: tuple[int, ...], objects: cgroups.Objects | None = None
    ) -> None:
        self._limit = limit
        self._objects = objects
        self._giving_back = _thread.allocate_lock()
        self._locks = locks
        self._sockets = sockets
        self._due = self._count_due = time.monotonic() + INTERVAL
        self._lowest: int | None = None
        self._names = self._most_names = 0

    def wait(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, (self._due if self._objects is None else self._count_due) - time.monotonic())

    def enforce(self, spared: Collection[int], ledger: Ledger) -> None:
        """Look, if it is time to; end every process but those spared if it is too much.

        Args:
            spared: our own.
            ledger: told before anything ends.
        """
        now = time.monotonic()
        if now >= self._count_due:  # which is one number to read, whatever the other looks have cost
            if self._objects_are_too_many():
                watchdog.end_all(spared, ledger)
            self._count_due = time.monotonic() + INTERVAL
        if now < self._due:
            return
        begun = time.process_time()  # of a processor, for waiting is what a hostile command would have it do
        pause = INTERVAL
        if self._is_too_much(spared):
            watchdog.end_all(spared, ledger)
        else:
            pause = min(max(pause, _SHARE * (time.process_time() - begun)), _LONGEST_PAUSE)
        self._due = time.monotonic() + pause

    def _is_too_much(self, spared: Collection[int]) -> bool:
        if self._sockets and self._sockets_stay_too_many(self._sockets):
            return True
        if _undone(spared) > _MOST_UNDONE or self._page_tables_are_too_many(spared):
            return True
        if _lasts(lambda: filelocks.seem_too_many(self._locks, _tables(spared), spared)):
            return True
        return self._directories_are_too_many(spared)

    def _sockets_stay_too_many(self, sockets: Sockets) -> bool:
        # sockets that come and go between two tables of one look count for what they are not: it must be so twice
        if not all(self._sockets_are_too_many(sockets) for _ in range(2)):
            return False
        # a program that ends may have closed the other side of hundreds, which are not shown then
        return not sockets.hidden or _lasts(lambda: self._sockets_are_too_many(sockets))

    def _sockets_are_too_many(self, sockets: Sockets) -> bool:
        return (
            sockets.held() > self._limit
            or sockets.netlink > _MOST_NETLINK
            or sockets.groups > _MOST_GROUPS
            or sockets.sharing > _MOST_SHARING
        )

    def _page_tables_are_too_many(self, spared: Collection[int]) -> bool:
        most = _TABLES + self._limit // _TABLES_SHARE
        told = self._objects.page_tables() if self._objects else None
        if told is not None and told <= most:  # which is one number to read
            return False
        # a child of vfork(2) has its parent's: it must be so twice
        return all(sum(_page_tables(pid) for pid in every_pid() if pid not in spared) > most for _ in range(2))

    def _objects_are_too_many(self) -> bool:
        """Whether small objects take more than they may, when those that can be given back are gone."""
        objects = self._objects
        if objects is None:
            return False
        most = _OBJECTS + self._limit // _OBJECTS_SHARE + _FILE * _names("/dev/shm")  # noqa: S108 - the sandbox's own
        held = objects.held()
        if held > most:
            most += _PROCESS * sum(1 for _ in every_pid())
        if held <= most or objects.emptying == -1:
            return held > most
        # in a thread, for code inside can make it last; where an earlier one is at it still, its time is up
        if self._giving_back.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._give_back, (objects,))
            except RuntimeError:  # there are as many processes as there may be
                self._giving_back.release()
                return True
            most_meanwhile = held + _OBJECTS // 16  # no more waiting where they become more
            for _ in range(_MOST_WAITS):
                if ended := self._giving_back.acquire(timeout=_PATIENCE):
                    self._giving_back.release()
                held = objects.held()
                if ended or not most < held <= most_meanwhile:
                    break
        return held > most

    def _give_back(self, objects: cgroups.Objects) -> None:
        try:
            objects.give_back()
        finally:
            self._giving_back.release()

    def _directories_are_too_many(self, spared: Collection[int]) -> bool:
        """Whether the machine's memory grew by the limit while open directories here could hold half of it.

        Before that they held less than half, and what the machine's memory has grown by since then is all that can
        have been added.
        """
        now = _unaccounted()
        if self._lowest is None:
            self._lowest, self._names = now, _names()
        self._lowest = min(self._lowest, now)
        self._most_names = max(self._most_names, _names() - self._names)
        if now - self._lowest < self._limit // 2:
            return False
        names = max(self._most_names, _NAMES_BELOW)
        enough = self._limit // 2 // (names * _NAME) + 1
        if not _lasts(lambda: _open_directories(spared, enough) >= enough):
            self._lowest = now
            return False
        return now - self._lowest > self._limit


def _lasts(seems: Callable[[], bool]) -> bool:
    """Whether something is so at each of some looks, where one that is made in a bad moment sees what is not."""
    for pause in _PAUSES:
        time.sleep(pause)
        if not seems():
            return False
    return True


def _undone(spared: Collection[int]) -> int:
    """How many semaphores there are, as often as there are processes: as many may have to be set back at their end."""
    semaphores = 0
    with contextlib.suppress(OSError), open("/proc/sysvipc/sem", "rb") as source:  # a kernel without them
        source.readline()
        semaphores = sum(int(line.split()[3]) + _SET for line in source)
    return semaphores * sum(1 for _ in _tables(spared)) if semaphores else 0


def _page_tables(pid: int) -> int:
    """Bytes of page tables of a process, beyond what each has."""
    row, threads = b"VmPTE:", f"/proc/{pid}/task"
    found = status_number(f"/proc/{pid}", row)
    if not found:
        with contextlib.suppress(OSError):  # its first thread has ended, and maybe all of it
            found = next(filter(None, (status_number(f"{threads}/{name}", row) for name in os.listdir(threads))), 0)
    return max(0, found * 1024 - _PROCESS)


def _open_directories(spared: Collection[int], enough: int) -> int:
    """How many directories are open here, or could be; no more are counted than are enough."""
    count, closed = _shown_directories(_tables(spared), enough)
    closed = [table for table in closed if may_hold(os.path.dirname(table), spared)]
    return count + sum_as_users(closed, lambda tables: _seen_by_user(tables, enough), _IN_FLIGHT, enough - count)


def _seen_by_user(tables: list[str], enough: int) -> int:
    count, closed = _shown_directories(tables, enough)
    return count + _IN_FLIGHT * sum(may_hold(os.path.dirname(table), ()) for table in closed)


def _shown_directories(tables: Iterable[str], enough: int) -> tuple[int, list[str]]:
    """How many directories some tables show, as far as they are counted, and the tables that do not show any."""
    count = looked_at = 0
    closed: list[str] = []
    last: tuple[str, list[str]] = ("", [])
    for table in tables:
        try:
            names = os.listdir(table)
            before, last = last, (table.partition("/task/")[0], names)
            if before == last:  # a thread of the same process that shares the table, as most do
                continue
            looked_at += len(names)
            count += len(names) if looked_at > _MOST_LOOKED_AT else sum(_directories(table, name) for name in names)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except OSError:
            closed.append(table)
        if count >= enough:
            break
    return count, closed


def _tables(spared: Collection[int]) -> Iterator[str]:
    """The descriptor tables of every process; a thread may have its own (clone(2))."""
    for pid in every_pid():
        if pid not in spared:
            with contextlib.suppress(OSError):
                yield from (f"/proc/{pid}/task/{thread}/fd" for thread in os.listdir(f"/proc/{pid}/task"))


def _directories(table: str, name: str) -> int:
    """How many directories a descriptor keeps open, or could.

    Raises:
        PermissionError: the process does not show it.
    """
    try:
        mode = os.stat(f"{table}/{name}").st_mode
        if stat.S_ISDIR(mode):
            return 1
        if stat.S_ISSOCK(mode):
            with open(f"{os.path.dirname(table)}/fdinfo/{name}", "rb") as source:
                under_way = any(line.startswith(b"scm_fds:") and int(line.split()[1]) for line in source)
            return _IN_FLIGHT if under_way else 0
    except PermissionError:
        raise
    except OSError:  # it has just been closed
        return 0
    return 0


def _unaccounted() -> int:
    """Bytes of small objects that the kernel cannot give back, on the whole machine."""
    with open("/proc/meminfo", "rb") as source:
        return next((int(line.split()[1]) for line in source if line.startswith(b"SUnreclaim:")), 0) * 1024


def _names(place: str = "/") -> int:
    """How many files there are where the sandbox writes, or in its memory; each name of one counts on a tmpfs."""
    status = os.statvfs(place)
    return status.f_files - status.f_ffree
