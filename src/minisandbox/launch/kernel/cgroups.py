"""Control groups: how much memory, how many processes and how much CPU a sandbox may use, enforced by the kernel.

Sandboxes always lie inside the group that this process is in, so that the limits of a service or a container hold for
them too, and no other group is touched (systemd's single-writer rule). Version 2 where that group has the needed
controllers and may be written, version 1 where its directories may be
(Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, cgroup-v1/pids.rst). Where neither is so there are no
groups, and :mod:`.watchdog` does what can be done without.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import syscalls as sc

NEEDED = ("memory", "pids")
OPTIONAL = ("cpu",)
PREFIX = "minisandbox-"
_ROOT = "/sys/fs/cgroup"
_OWN = "/proc/self/cgroup"
_PERIOD = 100_000  # microseconds of one round of the CPU limit
_PATIENCE = 2.0
LEAF = "others"
"""The group below ours, in version 2, that our processes are moved to."""
_ATTEMPTS = 10
_MEMORY_1 = (("memory.limit_in_bytes", 1), ("memory.memsw.limit_in_bytes", 1), ("memory.kmem.tcp.limit_in_bytes", 8))
"""What is limited to which part. The last one: version 1 counts TCP's buffers by themselves, if it is told to."""
_OBJECTS_1 = (("memory.kmem.usage_in_bytes", os.O_RDONLY), ("memory.force_empty", os.O_WRONLY))
_STATISTICS, _QUOTA_1 = "memory.stat", "cpu.cfs_quota_us"
_NO_QUOTA = {1: "-1", 2: "max"}
_COUNTERS = {"memory": (("memory.events", "memory.oom_control"), "oom_kill"), "pids": (("pids.events",), "max")}


@dataclass(frozen=True, slots=True)
class Places:
    """Where groups can be made.

    Attributes:
        version: 2 or 1; 0 where they cannot be made.
        directories: by controller, the group below which ours are made; one and the same in version 2.
    """

    version: int
    directories: tuple[tuple[str, str], ...] = ()

    @property
    def controllers(self) -> frozenset[str]:
        """What can be limited."""
        return frozenset(name for name, _ in self.directories)


def find_places(root: str = _ROOT, own: str = _OWN) -> Places:
    """Look where this process may make groups that limit memory and processes.

    Args:
        root: where control groups are mounted.
        own: the file that tells this process's groups (cgroups(7)).
    """
    rows = [line.rstrip("\n").split(":", 2) for line in _lines(own)]
    unified = [path for number, names, path in rows if number == "0" and not names]
    for directory in (own_group(mount, path) for mount in (root, f"{root}/unified") for path in unified):
        available = set(_words(f"{directory}/cgroup.controllers"))
        if available.issuperset(NEEDED) and _writable(directory):
            return Places(2, tuple((name, directory) for name in (*NEEDED, *OPTIONAL) if name in available))
    found = []
    for _, names, path in rows:
        for name in names.split(","):
            directory = f"{root}/{name}{path}".rstrip("/")
            if name in (*NEEDED, *OPTIONAL) and _writable(directory):
                found.append((name, directory))
    return Places(1, tuple(found)) if {name for name, _ in found}.issuperset(NEEDED) else Places(0)


def own_group(mount: str, path: str) -> str:
    """The directory of this process's group of version 2; that above a leaf that its processes were moved to.

    Args:
        mount: where groups of version 2 are mounted.
        path: as the kernel calls the group (cgroups(7)).
    """
    directory = f"{mount}{path}".rstrip("/")
    return os.path.dirname(directory) if os.path.basename(directory) == LEAF else directory


def _writable(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK) and os.access(f"{directory}/cgroup.procs", os.W_OK)


def open_places(places: Places) -> Places:
    """Have groups that are made there get the controllers, and return what they get.

    In version 2 a group that has processes gives none to those below it, so its processes are moved to a leaf first.
    To be called where every process of the group can be seen.

    Raises:
        OSError: the kernel refused.
    """
    if places.version != 2:
        return places
    directory = places.directories[0][1]
    setting = f"{directory}/cgroup.subtree_control"
    given = set(_words(setting))
    if not given.issuperset(NEEDED):
        _enable(directory, setting)
    if not given.issuperset(places.controllers):
        with contextlib.suppress(OSError):  # there are realtime processes, for example
            sc.write_setting(setting, " ".join(f"+{name}" for name in OPTIONAL if name in places.controllers))
        given = set(_words(setting))
    return Places(2, tuple(pair for pair in places.directories if pair[0] in given))


def _enable(directory: str, setting: str) -> None:
    wanted = " ".join(f"+{name}" for name in NEEDED)
    for _ in range(_ATTEMPTS):  # what is forked meanwhile is moved at the next attempt
        try:
            sc.write_setting(setting, wanted)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            return
        os.makedirs(f"{directory}/{LEAF}", 0o755, exist_ok=True)
        for pid in _words(f"{directory}/cgroup.procs"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                sc.write_setting(f"{directory}/{LEAF}/cgroup.procs", pid)
    raise OSError(errno.EBUSY, "processes stay in the control group", directory)


class Groups:
    """The groups of one owner's sandboxes, below a directory that names the owner.

    Args:
        places: where they are made (:func:`open_places`).
        owner: what the owner is called: its pid, start time and boot.

    Raises:
        OSError: the kernel refused.
    """

    def __init__(self, places: Places, owner: str) -> None:
        self.places = places
        self._bases = {name: f"{directory}/{PREFIX}{owner}" for name, directory in places.directories}
        self._count = 0
        for base in set(self._bases.values()):
            os.mkdir(base, 0o755)
        self._use(NEEDED)

    def _use(self, names: Iterable[str]) -> None:
        if self.places.version == 2:
            sc.write_setting(f"{self._bases['memory']}/cgroup.subtree_control", " ".join(f"+{name}" for name in names))

    def make(self, *, cpu: bool = False) -> Group:
        """A new, empty group without limits.

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
        return Group(self.places.version, directories)

    def _make(self, directory: str) -> None:
        try:
            os.mkdir(directory, 0o755)
        except FileNotFoundError:  # somebody tidied the owner's group away while it was empty (notify_on_release)
            os.mkdir(os.path.dirname(directory), 0o755)
            self._use(NEEDED)
            os.mkdir(directory, 0o755)


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one sandbox.

    Attributes:
        version: 1 or 2.
        directories: its directory for each controller.
    """

    version: int
    directories: dict[str, str]

    def join(self) -> None:
        """Have the calling process, and all that it forks from now on, in it."""
        for directory in set(self.directories.values()):
            sc.write_setting(f"{directory}/cgroup.procs", "0")

    def can_limit(self, name: str) -> bool:
        """Whether there is a controller for a limit."""
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
                sc.write_setting(f"{directory}/cpu.max", f"{quota} {_PERIOD}")
            else:
                sc.write_setting(f"{directory}/cpu.cfs_period_us", str(_PERIOD))
                sc.write_setting(f"{directory}/{_QUOTA_1}", str(quota))

    def _limit_memory(self, directory: str, amount: int) -> None:
        for name, share in (("memory.max", 1),) if self.version == 2 else _MEMORY_1:
            if os.path.exists(f"{directory}/{name}"):  # memsw: only where the kernel counts swap
                sc.write_setting(f"{directory}/{name}", str(amount // share))
        if self.version == 2 and os.path.exists(f"{directory}/memory.swap.max"):
            sc.write_setting(f"{directory}/memory.swap.max", "0")

    def _open_counters(self) -> list[int]:
        """Descriptors of the files that count what the limits refused: memory, then processes."""
        return [_open_first(self.directories[name], files) for name, (files, _) in _COUNTERS.items()]

    def open(self) -> Hold:
        """What its pid 1 needs of it, which sees none of its directories."""
        directory = self.directories["memory"]
        files = ((_STATISTICS, os.O_RDONLY),) if self.version == 2 else _OBJECTS_1
        known = all(os.path.exists(f"{directory}/{name}") for name, _ in files)
        objects = Objects(*(_open(f"{directory}/{name}", flags) for name, flags in files)) if known else None
        quota = _open(self._quota(), os.O_WRONLY) if "cpu" in self.directories else -1
        return Hold(self._open_counters(), objects, quota, _NO_QUOTA[self.version])

    def lift_quota(self) -> None:
        """No longer limit the CPU: what is ended has memory to free first, and would wait for its turn to do so."""
        if "cpu" in self.directories:
            with contextlib.suppress(OSError):  # it is gone
                sc.write_setting(self._quota(), _NO_QUOTA[self.version])

    def _quota(self) -> str:
        return f"{self.directories['cpu']}/{'cpu.max' if self.version == 2 else _QUOTA_1}"

    def remove(self) -> None:
        """Remove the group, whose processes have ended; the kernel may need a moment to see that."""
        for directory in set(self.directories.values()):
            _remove(directory, time.monotonic() + _PATIENCE)


@dataclass(frozen=True, slots=True)
class Objects:
    """The small objects that the kernel holds for a group, such as areas of memory, open files and epoll watches.

    Attributes:
        counter: descriptor of the file that tells their bytes.
        emptying: one of the file to which a write gives back all that can be; -1 in version 2, which counts what cannot
            be given back by itself.
    """

    counter: int
    emptying: int = -1

    def held(self) -> int:
        """Bytes of them; in version 1 with those that can be given back, page tables, stacks and pipes."""
        return self._told(b"slab_unreclaimable ") or 0

    def page_tables(self) -> int | None:
        """Bytes of page tables, in version 1 with all the rest; None where it does not tell (before Linux 5.11)."""
        return self._told(b"pagetables ")

    def _told(self, name: bytes) -> int | None:
        data = os.pread(self.counter, 1 << 16, 0)
        if self.emptying != -1:
            return int(data)
        return next((int(row.split()[1]) for row in data.splitlines() if row.startswith(name)), None)

    def give_back(self) -> None:
        """Have the kernel give back what can be; code inside that reads without end can make this last without end."""
        if self.emptying != -1:
            with contextlib.suppress(OSError):  # a signal came
                os.write(self.emptying, b"0")


@dataclass(frozen=True, slots=True)
class Hold:
    """Open files of a group.

    Attributes:
        counters: those that count what the limits refused: memory, then processes.
        objects: what counts the kernel's small objects; None where the kernel does not tell.
        quota: the one that limits the CPU; -1 where it is not limited.
        no_quota: what to write to it for no limit.
    """

    counters: list[int]
    objects: Objects | None
    quota: int
    no_quota: str

    def keep_counters(self) -> None:
        """Close all but the counters: a worker needs no more."""
        objects = (self.objects.counter, self.objects.emptying) if self.objects else ()
        for descriptor in {*objects, self.quota} - {-1}:
            os.close(descriptor)

    def lift_quota(self) -> None:
        """As :meth:`Group.lift_quota`."""
        if self.quota != -1:
            os.write(self.quota, self.no_quota.encode())


def read_counters(descriptors: list[int]) -> list[int]:
    """What has been refused so far: memory (processes killed for it), then processes (forks).

    Args:
        descriptors: those of :attr:`Hold.counters`.
    """
    counts = []
    for descriptor, (_, word) in zip(descriptors, _COUNTERS.values(), strict=True):
        rows = (line.split() for line in os.pread(descriptor, 4096, 0).decode().splitlines())
        counts.append(next((int(row[1]) for row in rows if row[0] == word), 0))
    return counts


def owners(places: Places) -> Iterator[tuple[str, str]]:
    """The owners that have groups here, with their directories: a name and a path."""
    for directory in {directory for _, directory in places.directories}:
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if name.startswith(PREFIX):
                    yield name[len(PREFIX) :], f"{directory}/{name}"


def remove_owner(directory: str, patience: float = _PATIENCE) -> None:
    """Remove the groups of an owner that has ended; those that stay busy are left to the next who looks.

    Args:
        directory: theirs.
        patience: seconds, for all of them together.
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


def _open_first(directory: str, names: tuple[str, ...]) -> int:
    existing = [name for name in names if os.path.exists(f"{directory}/{name}")]
    return _open(f"{directory}/{(*existing, names[0])[0]}", os.O_RDONLY)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as source:
            return source.readlines()
    except OSError:
        return []


def _words(path: str) -> list[str]:
    return " ".join(_lines(path)).split()
