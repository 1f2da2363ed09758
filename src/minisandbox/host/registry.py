"""The registry of live sandboxes and their owners.

An owner is a process, named by its pid, its start time, the machine's boot and its namespaces of pids and of time: a
pid alone may be reused, after a restart both numbers come again, and in a container they are its
own. Each owner keeps a directory with one record per live sandbox and the paths of its control groups. The owner
removes both, or :mod:`.reaper` does once it is dead. A range of host ids is held by a lock, which the kernel drops.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from minisandbox.errors import HostError
from minisandbox.host import listeners
from minisandbox.host.os_errors import ELSEWHERE, runtime_os_error, runtime_os_errors
from minisandbox.launch.jobs import descendants
from minisandbox.launch.kernel import cgroups

T = TypeVar("T")
_START_TIME = 19  # from the state on (proc_pid_stat(5): field 22)
DOCTOR = ".doctor"
"""Ends the name of a control group that is made only to see whether one can be."""
_MACHINES = Path("/run/minisandbox")
_UNKNOWN = "unknown"
_GROUPS = "groups"
"""Name of the file that lists an owner's control groups."""


def runtime_directory() -> Path:
    """Return the private directory for this user's live records, created if missing.

    ``$MINISANDBOX_RUNTIME``, or ``minisandbox`` in ``$XDG_RUNTIME_DIR``, or ``/run/minisandbox`` if this user may
    write there, or one in ``/tmp``.

    Raises:
        HostError: the directory cannot be created, belongs to another user, or others may write to it.
    """
    chosen = os.environ.get("MINISANDBOX_RUNTIME")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        path = Path(chosen).absolute()  # the launcher works elsewhere
    elif runtime and os.access(runtime, os.W_OK) and os.stat(runtime).st_uid == os.geteuid():
        path = Path(runtime, "minisandbox")
    elif os.access("/run", os.W_OK):
        path = _MACHINES
    else:
        path = Path(f"/tmp/minisandbox-{os.geteuid()}")  # noqa: S108 - checked below: ours alone, or refused
    return _private(path)


def ranges_directory(runtime: Path) -> Path:
    """Return the directory for locks of id ranges; all processes of root share one.

    The ids are the machine's: two sandboxes with the same would share what the kernel counts by user.

    Raises:
        HostError: the directory cannot be created, belongs to another user, or others may write to it.
    """
    return _private(_MACHINES, "") / "ids" if os.access("/run", os.W_OK) else runtime / "ids"


def ranges_fault(directory: Path, error: OSError) -> HostError:
    """Return the error for locks of id ranges that cannot be created.

    Args:
        directory: of :func:`ranges_directory`.
        error: what the kernel said.
    """
    return runtime_os_error(
        "make locks of id ranges", directory, error, "" if directory.is_relative_to(_MACHINES) else ELSEWHERE
    )


def _private(path: Path, elsewhere: str = ELSEWHERE, what: str = "make a runtime directory") -> Path:
    with runtime_os_errors(what, path, elsewhere):
        for directory in (*reversed(path.parents), path):  # whatever the umask: others could put things of theirs there
            if not directory.exists():
                directory.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise HostError(
            f"{path} is not a private directory of this user",
            reason="it is not a directory, belongs to another user, or others may write to it",
            hint=f"remove it, or {elsewhere}" if elsewhere else "remove it",
        )
    return path


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not exist or has ended in all its threads."""
    fields = descendants.stat_fields(pid)
    return None if not fields or descendants.has_ended(pid, fields[0]) else int(fields[_START_TIME])


def has_ended(pid: int) -> bool:
    """Return whether all threads of a process have exited, even if /proc hides the process (hidepid)."""
    if descendants.stat_fields(pid):
        return start_time(pid) is None
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except (ProcessLookupError, OverflowError):
        return True
    return False


def boot_id() -> str:
    """Return the kernel's id of the current boot (random(4)), without dashes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    except OSError:  # hidden in some containers; a restart then only shows by pids and start times
        return _UNKNOWN


def owner_name(pid: int | None = None) -> str:
    """Return the name of a process as an owner: pid, start time, boot, and namespaces.

    Args:
        pid: which process; this one if None.
    """
    number = os.getpid() if pid is None else pid
    return f"{number}-{start_time(number)}-{boot_id()}-{_namespaces()}"


def is_alive(owner: str) -> bool:
    """Return whether the owner of that name, or the doctor that it runs, is visibly alive."""
    return not is_dead(owner) and owner.removesuffix(DOCTOR).endswith(f"-{_namespaces()}")


def is_dead(owner: str) -> bool:
    """Return whether an owner is certainly dead. Owners in other namespaces count as alive until a reboot."""
    parts = owner.removesuffix(DOCTOR).split("-")
    if len(parts) != 4 or not (parts[0].isascii() and parts[0].isdigit()):
        return True
    pid, started, boot, namespaces = parts
    if boot != boot_id() and _UNKNOWN not in (boot, boot_id()):  # an unreadable boot id proves nothing
        return True
    if namespaces != _namespaces():
        return False
    return has_ended(int(pid)) or str(start_time(int(pid))) not in (started, "None")


def _namespaces() -> str:
    pids = os.readlink("/proc/thread-self/ns/pid").strip("pid:[]")
    try:
        return f"{pids}.{os.readlink('/proc/thread-self/ns/time').strip('time:[]')}"
    except FileNotFoundError:  # a kernel without CONFIG_TIME_NS
        return pids


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """One live sandbox.

    Attributes:
        id: its name.
        owner: pid of the process that owns it.
        image: name of its image.
        created: seconds since the epoch.
        pid: host pid of its first process.
        network: ``off``, ``allow`` or ``host``.
        labels: what its maker calls it.
        expires: when its lifetime is over, in seconds since the epoch, or None.
        workdir: where its commands start.
        base_commit: the commit that its patches compare with.
        environment: what its commands find.
        output: bytes kept of each of a command's streams.
        enforcement: what holds the limits that depend on the machine.
        upper: ``memory``, ``disk`` or ``given``.
        user: as whom commands run that name no user; "" for root.
    """

    id: str
    owner: int
    image: str
    created: float
    pid: int
    network: str
    labels: Mapping[str, str] = field(default_factory=dict)
    expires: float | None = None
    workdir: str = "/"
    base_commit: str = "HEAD"
    environment: Mapping[str, str] = field(default_factory=dict)
    output: int = 1 << 20
    enforcement: Mapping[str, str] = field(default_factory=dict)
    upper: str = "memory"
    user: str = ""


class Records:
    """The records of this process's own sandboxes.

    Args:
        runtime: the runtime directory.

    Raises:
        HostError: their directory cannot be made.
    """

    def __init__(self, runtime: Path) -> None:
        self.directory = runtime / "owners" / owner_name()
        self._descriptor = -1
        self._make("make a directory for records of sandboxes")

    def _make(self, what: str) -> None:
        """Make and open the directory; its descriptor saves the check of its parents at each use."""
        _private(self.directory.parent, what=what)
        with runtime_os_errors(what, self.directory):
            self.directory.mkdir(mode=0o700, exist_ok=True)
            opened = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if self._descriptor < 0:
                self._descriptor = opened
            else:  # other threads may be using the number
                os.dup2(opened, self._descriptor, inheritable=False)
                os.close(opened)
            name = f"{cgroups.PREFIX}{self.directory.name}"
            groups = sorted({f"{directory}/{name}" for _, directory in cgroups.find_roots().directories})
            _write(self._descriptor, _GROUPS, json.dumps(groups))

    def _inside(self, what: str, act: Callable[[int], T]) -> T:
        """Act in the directory, made again where cleaners of /tmp removed it after days without a change.

        Raises:
            HostError: the kernel refused.
        """
        with runtime_os_errors(what, self.directory):
            try:
                return act(self._descriptor)
            except FileNotFoundError:
                self._make(what)
                return act(self._descriptor)

    def add(self, record: OwnerRecord) -> None:
        """Make a sandbox visible to ``sandbox ls``.

        Raises:
            HostError: its record cannot be written.
        """
        row = json.dumps({name: getattr(record, name) for name in OwnerRecord.__slots__})
        self._inside(f"record sandbox {record.id}", lambda directory: _write(directory, f"{record.id}.json", row))

    def listener(self, name: str) -> socket.socket:
        """Make a listener next to the records; see :func:`.listeners.listen`."""
        return self._inside(f"make the socket {name}", lambda directory: listeners.listen(directory, name))

    def remove(self, sandbox_id: str) -> None:
        """Remove the record and listeners of a sandbox. The reaper removes what cannot be removed now."""
        with contextlib.suppress(OSError):
            os.unlink(self.directory / f"{sandbox_id}.json")
        listeners.remove(self.directory, sandbox_id)

    def close(self) -> None:
        """Remove the owner's directory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        remove_directory(self.directory)


def _write(directory: int, name: str, text: str) -> None:
    """Write a private file in an open directory."""
    data = text.encode()
    private = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        if os.write(private, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(private)


def live_records(runtime: Path) -> Iterator[OwnerRecord]:
    """Yield the live sandboxes of every process of this user; remove the records of dead owners."""
    for _, record in located_records(runtime):
        yield record


def located_records(runtime: Path) -> Iterator[tuple[Path, OwnerRecord]]:
    """Yield the live sandboxes with the directories that hold their listeners."""
    for directory in owner_directories(runtime):
        if is_dead(directory.name) and not control_groups(directory):
            remove_directory(directory)
        for path in sorted(directory.glob("*.json")) if is_alive(directory.name) else ():
            with contextlib.suppress(
                FileNotFoundError, ValueError, TypeError, RecursionError
            ):  # being written, or gone
                record = OwnerRecord(**json.loads(path.read_text(encoding="utf-8")))
                if not has_ended(record.pid):
                    yield directory, record


def control_groups(directory: Path) -> tuple[Path, ...]:
    """Return the control groups of an owner that are still there, wherever they lie.

    Args:
        directory: the owner's.
    """
    try:
        paths = json.loads((directory / _GROUPS).read_text(encoding="utf-8", errors="surrogateescape"))
        groups = [Path(path) for path in paths]
    except (FileNotFoundError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(path for path in groups if path.name == f"{cgroups.PREFIX}{directory.name}" and path.is_dir())


def owner_directories(runtime: Path) -> list[Path]:
    """Return the directories of owners' records; ignore links and other users' directories."""
    try:
        directories = sorted((runtime / "owners").iterdir())
    except FileNotFoundError:
        return []
    return [path for path in directories if _is_own_directory(path)]


def _is_own_directory(path: Path) -> bool:
    """Return whether a path is a directory of this user; one that was just removed does not count."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def remove_directory(directory: Path) -> None:
    """Remove an owner's directory, which holds nothing but records; a racing remover is welcome.

    Whatever else may lie there must not keep this user from making sandboxes.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
