"""The registry of live sandboxes and their owners.

An owner is a process that creates sandboxes. Its name consists of its pid, its start time, the boot id, and its pid and
time namespaces: pids are reused, start times repeat after a reboot, and containers have separate pids. Each owner has a
directory with one record per live sandbox and the paths of its control groups. The owner removes the directory and the
groups; if it is killed, :mod:`.reaper` does. Ranges of host ids are reserved by locks, which the kernel releases.
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
from minisandbox.host.os_errors import OTHER_RUNTIME, runtime_os_error, runtime_os_errors
from minisandbox.launch.jobs import descendants
from minisandbox.launch.kernel import cgroups
from minisandbox.launch.kernel import syscalls as sc

T = TypeVar("T")
_START_TIME = 19  # index of field 22 of proc_pid_stat(5), starttime; index 0 is the state
DOCTOR = ".doctor"
"""Suffix of the name of control groups that the doctor creates as a trial."""
_MACHINES = Path("/run/minisandbox")
_UNKNOWN = "unknown"
_GROUPS = "groups"
"""Name of the file that lists an owner's control groups."""


def runtime_directory() -> Path:
    """Return the private directory for this user's records, and create it if it is missing.

    It is ``$MINISANDBOX_RUNTIME``, else ``minisandbox`` in ``$XDG_RUNTIME_DIR``, else ``/run/minisandbox`` if this user
    may write to ``/run``, else a directory in ``/tmp``.

    Raises:
        HostError: the directory cannot be created, belongs to another user, or others may write to it.
    """
    configured = os.environ.get("MINISANDBOX_RUNTIME")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if configured:
        path = Path(configured).absolute()  # absolute, because the launcher has another working directory
    elif runtime and os.access(runtime, os.W_OK) and os.stat(runtime).st_uid == os.geteuid():
        path = Path(runtime, "minisandbox")
    elif os.access("/run", os.W_OK):
        path = _MACHINES
    else:
        path = Path(f"/tmp/minisandbox-{os.geteuid()}")  # noqa: S108 - _private rejects other users' directories
    return _private(path)


def ranges_directory(runtime: Path) -> Path:
    """Return the directory for locks of id ranges, which all processes of root share.

    Host ids are global to the machine, and two sandboxes with the same ids would share resources counted per user.

    Raises:
        HostError: the directory cannot be created, belongs to another user, or others may write to it.
    """
    return _private(_MACHINES, "") / "ids" if os.access("/run", os.W_OK) else runtime / "ids"


def ranges_fault(directory: Path, error: OSError) -> HostError:
    """Return the error for locks of id ranges that cannot be created.

    Args:
        directory: the directory from :func:`ranges_directory`.
        error: the error of the kernel.
    """
    return runtime_os_error(
        "make locks of id ranges", directory, error, "" if directory.is_relative_to(_MACHINES) else OTHER_RUNTIME
    )


def _private(path: Path, other_directory: str = OTHER_RUNTIME, action: str = "make a runtime directory") -> Path:
    with runtime_os_errors(action, path, other_directory):
        for directory in (*reversed(path.parents), path):  # create parents as private too, whatever the umask
            if not directory.exists():
                directory.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise HostError(
            f"{path} is not a private directory of this user",
            reason="it is not a directory, belongs to another user, or others may write to it",
            hint=f"remove it, or {other_directory}" if other_directory else "remove it",
        )
    return path


def start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None if there is no such process or it has exited."""
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
    except OSError:  # some containers hide it; pids and start times must then suffice
        return _UNKNOWN


def owner_name(pid: int | None = None) -> str:
    """Return the name of a process as an owner: pid, start time, boot, and namespaces.

    Args:
        pid: pid of the process; this process if None.
    """
    owner_pid = os.getpid() if pid is None else pid
    return f"{owner_pid}-{start_time(owner_pid)}-{boot_id()}-{_namespaces()}"


def is_alive(owner: str) -> bool:
    """Return whether an owner, or the owner of a doctor's group, is alive and in this process's namespaces."""
    return not is_dead(owner) and owner.removesuffix(DOCTOR).endswith(f"-{_namespaces()}")


def is_dead(owner: str) -> bool:
    """Return whether an owner is certainly dead; owners in other namespaces count as alive until a reboot."""
    parts = owner.removesuffix(DOCTOR).split("-")
    if len(parts) != 4 or not (parts[0].isascii() and parts[0].isdigit()):
        return True
    pid, start, owner_boot_id, namespaces = parts
    # an owner of an earlier boot is dead, but an unknown boot id proves nothing
    if owner_boot_id != boot_id() and _UNKNOWN not in (owner_boot_id, boot_id()):
        return True
    if namespaces != _namespaces():
        return False
    return has_ended(int(pid)) or str(start_time(int(pid))) not in (start, "None")


def _namespaces() -> str:
    pids = os.readlink("/proc/thread-self/ns/pid").strip("pid:[]")
    try:
        return f"{pids}.{os.readlink('/proc/thread-self/ns/time').strip('time:[]')}"
    except FileNotFoundError:  # a kernel without CONFIG_TIME_NS
        return pids


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """The record of one live sandbox.

    Attributes:
        id: its id.
        owner: pid of its owner process.
        image: name of its image.
        created: creation time in seconds since the epoch.
        pid: host pid of its pid 1.
        network: ``off``, ``allow`` or ``host``.
        labels: labels given by the caller.
        expires: end of its lifetime in seconds since the epoch, or None.
        workdir: default working directory of commands.
        base_commit: commit that patches are compared with by default.
        environment: environment variables of every command.
        output: bytes kept per output stream of a command.
        enforcement: mechanisms that enforce the machine-dependent limits.
        upper: ``memory``, ``disk`` or ``given``.
        user: default user of commands; "" for root.
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
    """Manages the directory with the records of this process's sandboxes.

    Args:
        runtime: the runtime directory.

    Raises:
        HostError: the directory cannot be created.
    """

    def __init__(self, runtime: Path) -> None:
        self.directory = runtime / "owners" / owner_name()
        self._descriptor = -1
        self._make("make a directory for records of sandboxes")

    def _make(self, action: str) -> None:
        """Create and open the directory. With the open descriptor, its parents need no check at each use."""
        _private(self.directory.parent, action=action)
        with runtime_os_errors(action, self.directory):
            self.directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if self._descriptor < 0:
                self._descriptor = descriptor
            else:  # keep the descriptor number, because other threads may use it
                os.dup2(descriptor, self._descriptor, inheritable=False)
                os.close(descriptor)
            name = f"{cgroups.PREFIX}{self.directory.name}"
            groups = sorted({f"{directory}/{name}" for _, directory in cgroups.find_roots().directories})
            _write(self._descriptor, _GROUPS, json.dumps(groups))

    def _with_directory(self, action: str, function: Callable[[int], T]) -> T:
        """Call ``function`` with the directory; create it again if a cleaner of /tmp has removed it.

        Raises:
            HostError: the kernel refused.
        """
        with runtime_os_errors(action, self.directory):
            try:
                return function(self._descriptor)
            except FileNotFoundError:
                self._make(action)
                return function(self._descriptor)

    def add(self, record: OwnerRecord) -> None:
        """Write the record of a sandbox, which makes it visible to ``sandbox ls``.

        Raises:
            HostError: the record cannot be written.
        """
        row = json.dumps({name: getattr(record, name) for name in OwnerRecord.__slots__})
        self._with_directory(
            f"record sandbox {record.id}", lambda directory: _write(directory, f"{record.id}.json", row)
        )

    def listener(self, name: str) -> socket.socket:
        """Create a listener in the directory; see :func:`.listeners.listen`."""
        return self._with_directory(f"make the socket {name}", lambda directory: listeners.listen(directory, name))

    def remove(self, sandbox_id: str) -> None:
        """Remove the record and listeners of a sandbox, ignoring errors; the reaper removes the remaining files."""
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
    content = text.encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with sc.closing(os.open(name, flags, 0o600, dir_fd=directory)) as descriptor:
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def live_records(runtime: Path) -> Iterator[OwnerRecord]:
    """Yield the records of all live sandboxes of this user; remove the records of dead owners."""
    for _, record in located_records(runtime):
        yield record


def located_records(runtime: Path) -> Iterator[tuple[Path, OwnerRecord]]:
    """Yield the live sandboxes of this user with the directories of their listeners."""
    for directory in owner_directories(runtime):
        if is_dead(directory.name) and not control_groups(directory):
            remove_directory(directory)
        for path in sorted(directory.glob("*.json")) if is_alive(directory.name) else ():
            # another process may be writing or removing the record
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError, RecursionError):
                record = OwnerRecord(**json.loads(path.read_text(encoding="utf-8")))
                if not has_ended(record.pid):
                    yield directory, record


def control_groups(directory: Path) -> tuple[Path, ...]:
    """Return the existing control groups of an owner, as listed in its directory.

    Args:
        directory: the owner's directory.
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
        paths = sorted((runtime / "owners").iterdir())
    except FileNotFoundError:
        return []
    return [path for path in paths if _is_own_directory(path)]


def _is_own_directory(path: Path) -> bool:
    """Return whether a path is an existing directory of this user."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def remove_directory(directory: Path) -> None:
    """Remove an owner's directory and the files in it, ignoring errors.

    Several processes may remove it at once, and unexpected content must not keep this user from creating sandboxes.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
