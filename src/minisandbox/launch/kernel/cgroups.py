"""Limit the memory, processes and CPU of a sandbox with control groups.

The kernel enforces the limits, and its counters show which limit a command hit (:class:`LimitCounters`).

Control groups of sandboxes are created below the group of this process. So the limits of a service or a container apply
to its sandboxes too, and no other group is changed (systemd's single-writer rule). Version 2 is used if the own group
has the needed controllers and is writable, else version 1 if its directories are writable
(Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, cgroup-v1/pids.rst). Without either,
:mod:`minisandbox.launch.watchdog` enforces the limits as far as it can.
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
"""Version 2: the subgroup to which the processes of our own group are moved."""
MEMORY, PROCESSES, DISK, FILE_SIZE = "memory", "processes", "disk", "file_size"
"""Names of the limits in results."""
_ROOT = "/sys/fs/cgroup"
_OWN = "/proc/self/cgroup"
_PERIOD = 100_000  # microseconds of one round of the CPU limit
_PATIENCE = 2.0
_ATTEMPTS = 10
_MEMORY_1 = (("memory.limit_in_bytes", 1), ("memory.memsw.limit_in_bytes", 1), ("memory.kmem.tcp.limit_in_bytes", 8))
"""Version 1: (file, divisor of the limit). The kernel counts TCP buffers only if they have a limit."""
_QUOTA = {1: ("cpu.cfs_quota_us", "-1"), 2: ("cpu.max", "max")}
"""By version: the file that limits the CPU, and the value that removes the limit."""
_COUNTERS = (("memory", ("memory.events", "memory.oom_control"), "oom_kill"), ("pids", ("pids.events",), "max"))
_NOTED = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class CgroupRoots:
    """The directories in which control groups can be created.

    Attributes:
        version: 2 or 1; 0 if no groups can be created.
        directories: (controller, parent directory) pairs; version 2 has the same directory for all.
    """

    version: int
    directories: tuple[tuple[str, str], ...] = ()

    @property
    def controllers(self) -> frozenset[str]:
        """Names of the available controllers."""
        return frozenset(name for name, _ in self.directories)


def find_roots(root: str = _ROOT, membership: str = _OWN) -> CgroupRoots:
    """Find the directories in which this process can create groups that limit memory and processes.

    Args:
        root: where control groups are mounted.
        membership: the file that lists this process's groups (cgroups(7)).
    """
    rows = [line.rstrip("\n").split(":", 2) for line in lines(membership)]
    unified = [path for number, names, path in rows if number == "0" and not names]
    for directory in (own_group(mount, path) for mount in (root, f"{root}/unified") for path in unified):
        controllers = set(words(f"{directory}/cgroup.controllers"))
        if controllers.issuperset(NEEDED) and _writable(directory):
            return CgroupRoots(2, tuple((name, directory) for name in (*NEEDED, *OPTIONAL) if name in controllers))
    pairs = []
    for _, names, path in rows:
        for name in names.split(","):
            directory = f"{root}/{name}{path}".rstrip("/")
            if name in (*NEEDED, *OPTIONAL) and _writable(directory):
                pairs.append((name, directory))
    return CgroupRoots(1, tuple(pairs)) if {name for name, _ in pairs}.issuperset(NEEDED) else CgroupRoots(0)


def own_group(mount: str, path: str) -> str:
    """Return the directory of this process's version 2 group, or its parent if the group is the leaf.

    Args:
        mount: mount point of version 2.
        path: path of the group in /proc/PID/cgroup (cgroups(7)).
    """
    directory = f"{mount}{path}".rstrip("/")
    return os.path.dirname(directory) if os.path.basename(directory) == LEAF else directory


def enable_controllers(roots: CgroupRoots) -> CgroupRoots:
    """Enable the controllers for groups below the roots; return the roots with the controllers that were enabled.

    A version 2 group with processes cannot enable controllers for its subgroups, so its processes are moved to a leaf
    first. Call this in a process namespace in which every process of the group is visible.

    Raises:
        OSError: the kernel refused.
    """
    if roots.version != 2:
        return roots
    directory = roots.directories[0][1]
    setting = f"{directory}/cgroup.subtree_control"
    enabled = set(words(setting))
    if not enabled.issuperset(NEEDED):
        _enable(directory, setting)
    if not enabled.issuperset(roots.controllers):
        with contextlib.suppress(OSError):  # for example because of realtime processes
            sc.write_setting(setting, " ".join(f"+{name}" for name in OPTIONAL if name in roots.controllers))
        enabled = set(words(setting))
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
        for pid in words(f"{directory}/cgroup.procs"):
            with contextlib.suppress(ProcessLookupError):  # the process has exited
                sc.write_setting(f"{directory}/{LEAF}/cgroup.procs", pid)
    raise OSError(errno.EBUSY, "processes stay in the control group", directory)


class OwnerCgroups:
    """Creates the groups of one owner's sandboxes, below a directory named after the owner.

    Args:
        roots: directories to create groups in (:func:`enable_controllers`).
        owner: the owner's name: its pid, start time and boot id.

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
        """Create an empty group without limits.

        Args:
            cpu: whether the CPU will be limited, which makes the group a scheduler group. Without a CPU limit, the
                kernel schedules each session as one group (sched(7), autogroup). A supervisor that kills a command
                then competes with one group instead of a thousand processes.

        Raises:
            OSError: the kernel refused.
        """
        self._count += 1
        if cpu and "cpu" in self._bases:
            self._use(("cpu",))
        bases = {name: base for name, base in self._bases.items() if cpu or name in NEEDED}
        directories = {name: f"{base}/{self._count}" for name, base in bases.items()}
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
        directories: the group's directory for each controller.
    """

    version: int
    directories: dict[str, str]

    def can_limit(self, name: str) -> bool:
        """Return whether the group has a controller for a limit."""
        return {"processes": "pids"}.get(name, name) in self.directories

    def limit(self, name: str, amount: int) -> None:
        """Set one limit.

        Args:
            name: ``memory`` (bytes), ``processes`` (count) or ``cpu`` (thousandths of one CPU).
            amount: the limit in that unit.

        Raises:
            KeyError: there is no controller for the limit.
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
        for name, divisor in (("memory.max", 1),) if self.version == 2 else _MEMORY_1:
            if os.path.exists(f"{directory}/{name}"):  # memsw exists only if the kernel counts swap
                sc.write_setting(f"{directory}/{name}", str(amount // divisor))
        if self.version == 2 and os.path.exists(f"{directory}/memory.swap.max"):
            sc.write_setting(f"{directory}/memory.swap.max", "0")

    def open(self) -> CgroupFds:
        """Open the files that the sandbox's pid 1 needs, because it cannot see the group's directories."""
        counters = [_open_first(self.directories[controller], files) for controller, files, _ in _COUNTERS]
        quota = os.open(self._quota(), os.O_WRONLY | os.O_CLOEXEC) if "cpu" in self.directories else -1
        paths = {f"{directory}/cgroup.procs" for directory in self.directories.values()}
        joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in paths]
        return CgroupFds(counters, joins, quota, _QUOTA[self.version][1] if quota >= 0 else "")

    def lift_quota(self) -> None:
        """Remove the CPU limit, because it would delay exiting processes that have memory to free."""
        if "cpu" in self.directories:
            with contextlib.suppress(OSError):  # the group is gone
                sc.write_setting(self._quota(), _QUOTA[self.version][1])

    def _quota(self) -> str:
        return f"{self.directories['cpu']}/{_QUOTA[self.version][0]}"

    def remove(self) -> None:
        """Remove the group after its processes have exited; retry, because the kernel may need a moment."""
        for directory in set(self.directories.values()):
            _remove(directory, time.monotonic() + _PATIENCE)


@dataclass(frozen=True, slots=True)
class CgroupFds:
    """Descriptors of a group's files.

    Attributes:
        counters: files that count the hits of limits: memory, then processes.
        joins: files to which a process writes 0 to join the group.
        quota: the file that limits the CPU; -1 without a CPU limit.
        no_quota: the value that removes the CPU limit; "" without one.
    """

    counters: list[int]
    joins: list[int]
    quota: int
    no_quota: str

    def pack(self) -> list[int]:
        """Return all descriptors, to be sent to another process; :meth:`unpack` reads them."""
        return [*self.counters, *self.joins, *([self.quota] if self.no_quota else [])]

    @classmethod
    def unpack(cls, descriptors: list[int], no_quota: str) -> CgroupFds:
        """Return the files of descriptors that were received in the order of :meth:`pack`."""
        *others, quota = descriptors if no_quota else [*descriptors, -1]
        return cls(others[: len(_COUNTERS)], others[len(_COUNTERS) :], quota, no_quota)

    def join(self) -> None:
        """Move the calling process, and all processes that it forks later, into the group; close :attr:`joins`."""
        while self.joins:
            with sc.closing(self.joins.pop()) as procs:
                os.write(procs, b"0")

    def close_quota(self) -> None:
        """Close the quota file, because a worker needs only the counters."""
        if self.quota != -1:
            os.close(self.quota)

    def lift_quota(self) -> None:
        """Remove the CPU limit, as :meth:`Cgroup.lift_quota` does."""
        if self.quota != -1:
            os.write(self.quota, self.no_quota.encode())

    def read_counters(self) -> list[bytes]:
        """Return the contents of the files in :attr:`counters`."""
        return [os.pread(descriptor, 4096, 0) for descriptor in self.counters]


class LimitCounters:
    """Counters of the limits that a sandbox hits, shared by its pid 1 and its workers.

    A worker marks the counters when a command starts, and reports the limits hit since then when it exits.

    Args:
        fds: open files of the control group, or None without one.
        disk: a directory on the file system that receives the sandbox's writes.

    Attributes:
        fds: open files of the control group, or None.
        upper: limit of an upper on disk, or None.
    """

    def __init__(self, fds: CgroupFds | None, disk: str = "/dev/shm") -> None:  # noqa: S108 - the sandbox's own
        self.fds = fds
        self.upper: DiskLimit | None = None
        self._disk = disk
        # an anonymous shared mapping: all forked processes share it (mmap(2))
        self._memory_kills = memoryview(mmap.mmap(-1, _NOTED.size + SHARED_SIZE))
        self._marked: tuple[list[bytes], int] = ([], 0)

    def limit_upper(self, upper: int, limit: int) -> DiskLimit:
        """Add the limit of an upper on disk. Every process that shares these counters must call this.

        Args:
            upper: descriptor of the upper.
            limit: bytes that the upper may hold.
        """
        self.upper = DiskLimit(upper, limit, self._memory_kills[_NOTED.size :])
        return self.upper

    def note_memory(self) -> None:
        """Record that the watchdog is about to kill processes for memory. Only pid 1 calls this."""
        _NOTED.pack_into(self._memory_kills, 0, _NOTED.unpack_from(self._memory_kills)[0] + 1)

    def charge(self, size: int) -> None:
        """Reserve bytes in an upper on disk for a file operation.

        Raises:
            OSError: the limit would be exceeded (ENOSPC).
        """
        if self.upper:
            self.upper.charge(size)

    def mark(self) -> None:
        """Remember the counters, so that :meth:`hits` can compare with them."""
        self._marked = self._read()
        if self.upper:
            self.upper.mark()

    def hits(self) -> list[str]:
        """Return the limits that were hit since the last mark; a full disk counts as a hit of ``disk``."""
        now, limits = self._read(), []
        if now != self._marked:  # most commands hit no limit, so parsing is rare
            pairs = zip((MEMORY, PROCESSES), _counts(*self._marked), _counts(*now), strict=True)
            limits = [name for name, before, after in pairs if after > before]
        return [*limits, DISK] if self._is_full() or (self.upper and self.upper.was_hit()) else limits

    def _read(self) -> tuple[list[bytes], int]:
        contents = self.fds.read_counters() if self.fds else []
        return contents, _NOTED.unpack_from(self._memory_kills)[0]

    def _is_full(self) -> bool:
        try:
            status = os.statvfs(self._disk)
        except OSError:
            return False
        return status.f_blocks > 0 and (status.f_bavail == 0 or status.f_favail == 0)


def _counts(contents: list[bytes], memory_kills: int) -> list[int]:
    """Return the hits of each limit so far: processes killed for memory, then forks refused."""
    counts = [memory_kills, 0]
    for number, content in enumerate(contents):
        rows = (line.split() for line in content.decode().splitlines())
        counts[number] += next((int(row[1]) for row in rows if row[0] == _COUNTERS[number][2]), 0)
    return counts


def owners(roots: CgroupRoots) -> Iterator[tuple[str, str]]:
    """Yield the name and directory of each owner that has groups below the roots."""
    for directory in {directory for _, directory in roots.directories}:
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if name.startswith(PREFIX):
                    yield name[len(PREFIX) :], f"{directory}/{name}"


def remove_owner(directory: str, timeout: float = _PATIENCE) -> None:
    """Remove the groups of an owner that has exited; leave busy groups to the next call.

    Args:
        directory: the owner's directory.
        timeout: seconds to retry, for all groups together.
    """
    deadline = time.monotonic() + timeout
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            if os.path.isdir(f"{directory}/{name}"):
                _remove(f"{directory}/{name}", deadline)
    _remove(directory, deadline)


def _remove(directory: str, deadline: float) -> None:
    while True:
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        else:
            return


def _writable(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK) and os.access(f"{directory}/cgroup.procs", os.W_OK)


def _open_first(directory: str, names: tuple[str, ...]) -> int:
    existing_names = [name for name in names if os.path.exists(f"{directory}/{name}")]
    return os.open(f"{directory}/{(*existing_names, names[0])[0]}", os.O_RDONLY | os.O_CLOEXEC)


def lines(path: str) -> list[str]:
    """Return the lines of a file below /proc or /sys, or [] if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as source:
            return source.readlines()
    except OSError:
        return []


def words(path: str) -> list[str]:
    """Return the words of a file below /proc or /sys, or [] if it cannot be read."""
    return " ".join(lines(path)).split()
