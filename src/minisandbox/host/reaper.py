"""Who owns live sandboxes, and what dead owners left behind.

An owner is a process, named by its pid and start time: a pid alone may already belong to somebody else. Each owner
keeps a directory with one record per live sandbox; it is removed by the owner, or by whoever finds its owner dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.host import doors
from minisandbox.launch import limits

_START_TIME_FIELD = 19  # of the fields after the command name in /proc/PID/stat (proc_pid_stat(5): field 22)


def runtime_directory() -> Path:
    """The private directory for this user's live records, made if missing.

    ``$MINISANDBOX_RUNTIME``, or ``minisandbox`` in ``$XDG_RUNTIME_DIR``, or ``/run/minisandbox`` where this user may
    write there, or one in ``/tmp``.

    Raises:
        PermissionError: the directory belongs to somebody else or others may write to it.
    """
    chosen = os.environ.get("MINISANDBOX_RUNTIME")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        path = Path(chosen).absolute()  # the launcher works elsewhere
    elif runtime and os.access(runtime, os.W_OK) and os.stat(runtime).st_uid == os.geteuid():
        path = Path(runtime, "minisandbox")
    elif os.access("/run", os.W_OK):
        path = Path("/run/minisandbox")
    else:
        path = Path(f"/tmp/minisandbox-{os.geteuid()}")  # noqa: S108 - checked below: ours alone, or refused
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not a private directory of this user; remove it or set MINISANDBOX_RUNTIME")
    return path


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            fields = source.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_START_TIME_FIELD])


def owner_name() -> str:
    """What this process is called as an owner: its pid, and when it started."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


@dataclass(frozen=True, slots=True)
class Record:
    """One live sandbox.

    Attributes:
        id: its name.
        owner: pid of the process that owns it.
        image: name of its image.
        created: seconds since the epoch.
        pid: host pid of its first process.
        network: ``off``, ``allow`` or ``host``.
        labels: what its maker calls it.
        expires: seconds since the epoch when it ends by itself, or None.
        workdir: where its commands start.
        base_commit: the commit that its patches compare with.
        environment: what its commands find.
        output: bytes kept of each of a command's streams.
        enforcement: what holds the limits that depend on the machine.
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


class Records:
    """The records of this process's own sandboxes.

    Args:
        runtime: the runtime directory.
    """

    def __init__(self, runtime: Path) -> None:
        self.directory = runtime / "owners" / owner_name()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, record: Record) -> None:
        """Make a sandbox visible to ``sandbox ls``."""
        row = {name: getattr(record, name) for name in Record.__slots__}
        # a long-lived owner's directory may be gone: cleaners of /tmp remove what nobody has touched for days
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = os.open(self.directory / f"{record.id}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(private, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.write(json.dumps(row))

    def remove(self, sandbox_id: str) -> None:
        """Forget a sandbox and its doors."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / f"{sandbox_id}.json")
        doors.remove(self.directory, sandbox_id)

    def close(self) -> None:
        """Remove the owner's directory."""
        _remove_directory(self.directory)


def live_records(runtime: Path) -> Iterator[Record]:
    """The live sandboxes of every process of this user; what dead owners left is removed on the way."""
    for _, record in located_records(runtime):
        yield record


def located_records(runtime: Path) -> Iterator[tuple[Path, Record]]:
    """The live sandboxes with the directories that hold their doors."""
    for directory in _owner_directories(runtime):
        if not _is_alive(directory):
            _remove_directory(directory)
            continue
        for path in sorted(directory.glob("*.json")):
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # being written or removed right now
                record = Record(**json.loads(path.read_text(encoding="utf-8")))
                if start_time(record.pid) is not None:
                    yield directory, record


def reap(runtime: Path) -> int:
    """Remove what dead owners left behind; returns how many owners that were."""
    reap_groups()
    dead = [directory for directory in _owner_directories(runtime) if not _is_alive(directory)]
    for directory in dead:
        _remove_directory(directory)
    return len(dead)


def reap_groups(*names: str) -> None:
    """Remove the control groups of owners that have ended.

    Args:
        names: owners that have ended although their processes still run (:func:`owner_name`).
    """
    for name, directory in limits.owners(limits.find_places()):
        pid, _, started = name.partition("-")
        if name in names or not pid.isdigit() or str(start_time(int(pid))) != started:
            limits.remove_owner(directory)


def _owner_directories(runtime: Path) -> list[Path]:
    try:
        return sorted((runtime / "owners").iterdir())
    except FileNotFoundError:
        return []


def _is_alive(directory: Path) -> bool:
    pid, _, started = directory.name.partition("-")
    return pid.isdigit() and str(start_time(int(pid))) == started


def _remove_directory(directory: Path) -> None:
    """Remove an owner's directory, which holds nothing but records; a racing remover is welcome.

    Whatever else may lie there must not keep this user from making sandboxes.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
