"""Control groups: the kernel limits a sandbox's memory, processes and CPU.

The kernel's own accounting is the limit, and its counters say which limit a command met (:class:`LimitCounters`).

Sandboxes always lie inside the group that this process is in, so that the limits of a service or a container hold for
them too, and no other group is touched (systemd's single-writer rule). Version 2 is used where that group has the
needed controllers and may be written, version 1 where its directories may be
(Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, cgroup-v1/pids.rst). Without either,
:mod:`minisandbox.launch.watchdog` does what can be done.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minisandbox.launch.disk import SHARED_SIZE, DiskLimit

from . import syscalls as sc

NEEDED = ("memory", "pids")
OPTIONAL = ("cpu",)
PREFIX = "minisandbox-"
LEAF = "others"
"""The group below ours, in version 2, that our processes are moved to."""
MEMORY, PROCESSES, DISK, FILE_SIZE = "memory", "processes", "disk", "file_size"
"""Limits, as results name them."""
_ROOT = "/sys/fs/cgroup"
_OWN = "/proc/self/cgroup"
_PERIOD = 100_000  # microseconds of one round of the CPU limit
_PATIENCE = 2.0
_ATTEMPTS = 10
_MEMORY_1 = (("memory.limit_in_bytes", 1), ("memory.memsw.limit_in_bytes", 1), ("memory.kmem.tcp.limit_in_bytes", 8))
"""Version 1: each file, and which part of the limit it gets. TCP's buffers are only counted if they have a limit."""
_QUOTA = {1: ("cpu.cfs_quota_us", "-1"), 2: ("cpu.max", "max")}
"""By version: the file that limits the CPU, and what lifts the limit."""
_COUNTERS = (("memory", ("memory.events", "memory.oom_control"), "oom_kill"), ("pids", ("pids.events",), "max"))
_NOTED = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class CgroupRoots:
    """The directories in which control groups can be created.

    Attributes:
        version: 2 or 1; 0 if no groups can be made.
        directories: by controller, the group below which ours are made; one and the same in version 2.
    """

    version: int
    directories: tuple[tuple[str, str], ...] = ()

    @property
    def controllers(self) -> frozenset[str]:
        """What can be limited."""
        return frozenset(name for name, _ in self.directories)


def find_roots(root: str = _ROOT, membership: str = _OWN) -> CgroupRoots:
    """Find where this process may make groups that limit memory and processes.

    Args:
        root: where control groups are mounted.
        membership: the file that lists this process's groups (cgroups(7)).
    """
    rows = [line.rstrip("\n").split(":", 2) for line in _lines(membership)]
    unified = [path for number, names, path in rows if number == "0" and not names]
    for directory in (own_group(mount, path) for mount in (root, f"{root}/unified") for path in unified):
        available = set(_words(f"{directory}/cgroup.controllers"))
        if available.issuperset(NEEDED) and _writable(directory):
            return CgroupRoots(2, tuple((name, directory) for name in (*NEEDED, *OPTIONAL) if name in available))
    pairs = []
    for _, names, path in rows:
        for name in names.split(","):
            directory = f"{root}/{name}{path}".rstrip("/")
            if name in (*NEEDED, *OPTIONAL) and _writable(directory):
                pairs.append((name, directory))
    return CgroupRoots(1, tuple(pairs)) if {name for name, _ in pairs}.issuperset(NEEDED) else CgroupRoots(0)


def own_group(mount: str, path: str) -> str:
    """Return the directory of this process's group of version 2, or the one above if that is the leaf.

    Args:
        mount: where groups of version 2 are mounted.
        path: as the kernel calls the group (cgroups(7)).
    """
    directory = f"{mount}{path}".rstrip("/")
    return os.path.dirname(directory) if os.path.basename(directory) == LEAF else directory


def enable_controllers(roots: CgroupRoots) -> CgroupRoots:
    """Give the controllers to groups made below the roots; returns the roots with the controllers that these get.

    In version 2 a group that has processes gives none to those below it, so its processes are moved to a leaf first.
    Call this where every process of the group can be seen.

    Raises:
        OSError: the kernel refused.
    """
    if roots.version != 2:
        return roots
    directory = roots.directories[0][1]
    setting = f"{directory}/cgroup.subtree_control"
    enabled = set(_words(setting))
    if not enabled.issuperset(NEEDED):
        _enable(directory, setting)
    if not enabled.issuperset(roots.controllers):
        with contextlib.suppress(OSError):  # there are realtime processes, for example
            sc.write_setting(setting, " ".join(f"+{name}" for name in OPTIONAL if name in roots.controllers))
        enabled = set(_words(setting))
    return CgroupRoots(2, tuple(pair for pair in roots.directories if pair[0] in enabled))


def _enable(directory: str, setting: str) -> None:
    additions = " ".join(f"+{name}" for name in NEEDED)
    for _ in range(_ATTEMPTS):  # the next attempt moves processes forked meanwhile
        try:
            sc.write_setting(setting, additions)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            return
        os.makedirs(f"{directory}/{LEAF}", 0o755, exist_ok=True)
        for pid in _words(f"{directory}/cgroup.procs"):
            with contextlib.suppress(ProcessLookupError):  # the process has exited
                sc.write_setting(f"{directory}/{LEAF}/cgroup.procs", pid)
    raise OSError(errno.EBUSY, "processes stay in the control group", directory)


class OwnerCgroups:
    """The groups of one owner's sandboxes, below a directory named after the owner.

    Args:
        roots: where they are made (:func:`enable_controllers`).
        owner: the owner's name: its pid, start time and boot.

    Raises:
        OSError: the kernel refused.
    """

    def __init__(self, roots: CgroupRoots, owner: str) -> None:
        self.roots = roots
        self._bases = {name: f"{directory}/{PREFIX}{owner}" for name, directory in roots.directories}
        self._count = 0
        for base in set(self._bases.values()):
            os.mkdir(base, 0o755)
        self._use(NEEDED)

    def _use(self, names: Iterable[str]) -> None:
        if self.roots.version == 2:
            sc.write_setting(f"{self._bases['memory']}/cgroup.subtree_control", " ".join(f"+{name}" for name in names))

    def make(self, *, cpu: bool = False) -> Cgroup:
        """Make a new, empty group without limits.

        Args:
            cpu: whether its CPU will be limited. Only then is it a group for the scheduler too: elsewhere each session
                is one (sched(7), autogroup), so that a supervisor need not compete with each of a thousand processes
                of the command that it is to end.

        Raises:
            OSError: the kernel refused.
        """
        self._count += 1
        if cpu and "cpu" in self._bases:
            self._use(("cpu",))
        used = {name: base for name, base in self._bases.items() if cpu or name in NEEDED}
        directories = {name: f"{base}/{self._count}" for name, base in used.items()}
        for directory in set(directories.values()):
            self._make(directory)
        return Cgroup(self.roots.version, directories)

    def _make(self, directory: str) -> None:
        try:
            os.mkdir(directory, 0o755)
        except FileNotFoundError:  # the owner's group was removed while it was empty (notify_on_release)
            os.mkdir(os.path.dirname(directory), 0o755)
            self._use(NEEDED)
            os.mkdir(directory, 0o755)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one sandbox.

    Attributes:
        version: 1 or 2.
        directories: its directory for each controller.
    """

    version: int
    directories: dict[str, str]

    def join(self) -> None:
        """Put the calling process, and everything that it forks from now on, into the group."""
        for directory in set(self.directories.values()):
            sc.write_setting(f"{directory}/cgroup.procs", "0")

    def can_limit(self, name: str) -> bool:
        """Return whether there is a controller for a limit."""
        return {"processes": "pids"}.get(name, name) in self.directories

    def limit(self, name: str, amount: int) -> None:
        """Set one limit.

        Args:
            name: ``memory`` (bytes), ``processes`` (count) or ``cpu`` (thousandths of one CPU).
            amount: how much.

        Raises:
            KeyError: there is no controller for it.
            OSError: the kernel refused.
        """
        if name == "memory":
            self._limit_memory(self.directories["memory"], amount)
        elif name == "processes":
            sc.write_setting(f"{self.directories['pids']}/pids.max", str(amount))
        else:
            directory, quota = self.directories["cpu"], amount * _PERIOD // 1000
            if self.version == 2:
                sc.write_setting(self._quota(), f"{quota} {_PERIOD}")
            else:
                sc.write_setting(f"{directory}/cpu.cfs_period_us", str(_PERIOD))
                sc.write_setting(self._quota(), str(quota))

    def _limit_memory(self, directory: str, amount: int) -> None:
        for name, share in (("memory.max", 1),) if self.version == 2 else _MEMORY_1:
            if os.path.exists(f"{directory}/{name}"):  # memsw: only if the kernel counts swap
                sc.write_setting(f"{directory}/{name}", str(amount // share))
        if self.version == 2 and os.path.exists(f"{directory}/memory.swap.max"):
            sc.write_setting(f"{directory}/memory.swap.max", "0")

    def open(self) -> CgroupFds:
        """Open what the sandbox's pid 1 needs of the group, because it sees none of its directories."""
        counters = [_open_first(self.directories[controller], files) for controller, files, _ in _COUNTERS]
        quota = os.open(self._quota(), os.O_WRONLY | os.O_CLOEXEC) if "cpu" in self.directories else -1
        return CgroupFds(counters, quota, _QUOTA[self.version][1])

    def lift_quota(self) -> None:
        """Stop limiting the CPU: processes that end have memory to free first, and would wait for their turn."""
        if "cpu" in self.directories:
            with contextlib.suppress(OSError):  # the group is gone
                sc.write_setting(self._quota(), _QUOTA[self.version][1])

    def _quota(self) -> str:
        return f"{self.directories['cpu']}/{_QUOTA[self.version][0]}"

    def remove(self) -> None:
        """Remove the group once its processes have exited; the kernel may need a moment to notice."""
        for directory in set(self.directories.values()):
            _remove(directory, time.monotonic() + _PATIENCE)


@dataclass(frozen=True, slots=True)
class CgroupFds:
    """Open files of a group.

    Attributes:
        counters: the files that count what the limits refused: memory, then processes.
        quota: the file that limits the CPU; -1 if it is not limited.
        no_quota: what to write to it for no limit.
    """

    counters: list[int]
    quota: int
    no_quota: str

    def close_quota(self) -> None:
        """Close all but the counters: a worker needs no more."""
        if self.quota != -1:
            os.close(self.quota)

    def lift_quota(self) -> None:
        """Lift the quota as :meth:`Cgroup.lift_quota` does."""
        if self.quota != -1:
            os.write(self.quota, self.no_quota.encode())

    def refusals(self) -> list[int]:
        """Count what has been refused so far: memory (processes killed for it), then processes (forks)."""
        counts = []
        for descriptor, (_, _, key) in zip(self.counters, _COUNTERS, strict=True):
            rows = (line.split() for line in os.pread(descriptor, 4096, 0).decode().splitlines())
            counts.append(next((int(row[1]) for row in rows if row[0] == key), 0))
        return counts


class LimitCounters:
    """Counters of one sandbox's refused requests, shared by its pid 1 and its workers.

    A worker marks where the counters stand when a command starts, and reports at its end which limits it met.

    Args:
        fds: open files of the control group, or None without one.
        disk: a directory on the file system that takes the sandbox's writes.

    Attributes:
        fds: the same.
        upper: the limit of its upper if that lies on disk, or None.
    """

    def __init__(self, fds: CgroupFds | None, disk: str = "/dev/shm") -> None:  # noqa: S108 - the sandbox's own
        self.fds = fds
        self.upper: DiskLimit | None = None
        self._disk = disk
        # shared with every process that is forked from here (mmap(2))
        self._noted = memoryview(mmap.mmap(-1, _NOTED.size + SHARED_SIZE))
        self._mark = [0, 0]

    def limit_upper(self, upper: int, limit: int) -> DiskLimit:
        """Count what lies in an upper on disk, too; each process that shares these counters calls this.

        Args:
            upper: descriptor of its directory.
            limit: bytes that it may hold.
        """
        self.upper = DiskLimit(upper, limit, self._noted[_NOTED.size :])
        return self.upper

    def note_memory(self) -> None:
        """Count that the watchdog ended processes; only pid 1 calls this."""
        _NOTED.pack_into(self._noted, 0, _NOTED.unpack_from(self._noted)[0] + 1)

    def charge(self, size: int) -> None:
        """Refuse a file operation's bytes that are too many for an upper on disk.

        Raises:
            OSError: the limit would be exceeded (ENOSPC).
        """
        if self.upper:
            self.upper.charge(size)

    def mark(self) -> None:
        """Remember where the counters stand."""
        self._mark = self._counts()
        if self.upper:
            self.upper.mark()

    def hits(self) -> list[str]:
        """List the limits that refused something since the last mark; a disk that is full now counts."""
        pairs = zip((MEMORY, PROCESSES), self._mark, self._counts(), strict=True)
        limits = [name for name, before, after in pairs if after > before]
        return [*limits, DISK] if self._is_full() or (self.upper and self.upper.was_hit()) else limits

    def _counts(self) -> list[int]:
        killed, refused = self.fds.refusals() if self.fds else (0, 0)
        return [killed + _NOTED.unpack_from(self._noted)[0], refused]

    def _is_full(self) -> bool:
        try:
            status = os.statvfs(self._disk)
        except OSError:
            return False
        return status.f_blocks > 0 and (status.f_bavail == 0 or status.f_favail == 0)


def owners(roots: CgroupRoots) -> Iterator[tuple[str, str]]:
    """Yield the name and directory of each owner that has groups here."""
    for directory in {directory for _, directory in roots.directories}:
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if name.startswith(PREFIX):
                    yield name[len(PREFIX) :], f"{directory}/{name}"


def remove_owner(directory: str, patience: float = _PATIENCE) -> None:
    """Remove the groups of an owner that has ended; busy ones are left to the next call.

    Args:
        directory: the owner's.
        patience: seconds, for all of the groups together.
    """
    give_up = time.monotonic() + patience
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            if os.path.isdir(f"{directory}/{name}"):
                _remove(f"{directory}/{name}", give_up)
    _remove(directory, give_up)


def _remove(directory: str, give_up: float) -> None:
    while True:
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > give_up:
                return
            time.sleep(0.001)
        else:
            return


def _writable(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK) and os.access(f"{directory}/cgroup.procs", os.W_OK)


def _open_first(directory: str, names: tuple[str, ...]) -> int:
    existing = [name for name in names if os.path.exists(f"{directory}/{name}")]
    return os.open(f"{directory}/{(*existing, names[0])[0]}", os.O_RDONLY | os.O_CLOEXEC)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as source:
            return source.readlines()
    except OSError:
        return []


def _words(path: str) -> list[str]:
    return " ".join(_lines(path)).split()
