"""Values shared by every package: frozen classes that validate and convert their own fields and do nothing else."""

from __future__ import annotations

import enum
import ipaddress
import re
import signal as _signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.errors import CommandFailed, InvalidValue

JSONValue = None | bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"]
KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_MOST = 1 << 62
_MOST_CHARACTERS = 0xFFFF
_MOST_CPUS = 100_000
_FEWEST_FILES = 16
"""A sandbox's own processes cannot start a command with fewer open files."""
_LEAST_MEMORY = 16 * MiB
_LONGEST_LIFETIME = 1e8
WORKDIR = PurePosixPath("/testbed")
"""The path of the repository in a built image."""
ENGINES = ("podman", "docker")  # values of ImageSpec.backend
LIMITS_HIT = ("memory", "processes", "disk", "file_size", "output")
"""The values that can appear in :attr:`ExecResult.limits_hit`."""

_MOST_HOSTS = 512
_LONGEST_NAME = 253
_LABEL = re.compile("[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNIT = {"": 1, "K": KiB, "M": MiB, "G": GiB, "T": 1024 * GiB}


def parse_size(value: int | str) -> int:
    """Convert a size to bytes.

    Args:
        value: bytes as an int, or text such as ``"512M"``, ``"2G"``, ``"64KiB"`` (powers of 1024).

    Returns:
        The size in bytes.

    Raises:
        InvalidValue: the text is not a size, or the size is negative or larger than 2**62 bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MOST:
            raise InvalidValue(f"size {value} is not between 0 and {_MOST} bytes", hint="give text such as '2G'")
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise InvalidValue(f"{value!r} is not a size", hint="give bytes as an int, or text such as '512M' or '2G'")
    size = float(match[1]) * _UNIT[match[2].upper()]
    if size > _MOST:
        raise InvalidValue(f"size {value!r} is too large", hint=f"give at most {_MOST} bytes")
    return int(size)


def human_size(size: float) -> str:
    """Format bytes: ``93.1 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < KiB:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= KiB
    return f"{size:.1f} TiB"


def is_number(value: object) -> bool:
    """Return whether ``value`` is an int or a float; booleans do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, init=False)
class Limits:
    """The resources that one sandbox may use. Every limit given here is enforced, or creation fails.

    Attributes:
        memory: bytes that all processes together may hold; with control groups, files in the tmpfs upper
            (``disk``) count too. None: no limit.
        cpu: how many CPUs may be busy at once, 0.01 or more; needs control groups. None: no limit.
        disk: bytes that all writes together may take (the size of the tmpfs upper, ``/tmp`` and ``/dev/shm`` included).
            Where sandboxes write to the store's disk (``info().upper``), a watchdog holds it: a command can exceed it
            for about a second before it is ended. With ``upper=`` this must be the default, and limits only ``/tmp``,
            ``/run`` and ``/dev/shm``: the upper may fill its disk.
        processes: how many processes and threads may exist at once.
        open_files: open descriptors per process, at least 16.
        file_size: apparent size in bytes of one file, holes included, in memory (memfd_create(2)) as on disk.
            Exceeding it raises SIGXFSZ, or EFBIG if that is ignored. None: no limit.
        output: bytes kept of each of a command's stdout and stderr (half from the head, half from the tail).
        inotify: inotify instances that may exist at once.
        lifetime: seconds after which the sandbox ends, even if its owner hangs; snapshots and resets do not extend
            it, forks start their own. None: it ends when it is stopped or the process that made it ends.
    """

    memory: int | None
    cpu: float | None
    disk: int
    processes: int
    open_files: int
    file_size: int | None
    output: int
    inotify: int
    lifetime: float | None

    def __init__(
        self,
        *,
        memory: int | str | None = 4 * GiB,
        cpu: float | None = None,
        disk: int | str = 2 * GiB,
        processes: int = 1024,
        open_files: int = 4096,
        file_size: int | str | None = 64 * GiB,
        output: int | str = MiB,
        inotify: int = 32,
        lifetime: float | None = None,
    ) -> None:
        for name, count in (("processes", processes), ("open_files", open_files), ("inotify", inotify)):
            if type(count) is not int or not 1 <= count <= _MOST:  # True is an int too
                raise InvalidValue(f"Limits.{name} is {count!r}", hint="give a positive int")
        if open_files < _FEWEST_FILES:
            raise InvalidValue(
                f"Limits.open_files is {open_files}",
                reason=f"no command can start with fewer than {_FEWEST_FILES}",
                hint=f"give {_FEWEST_FILES} or more",
            )
        if parse_size(disk) == 0:  # tmpfs(5) takes 0 as no limit
            raise InvalidValue("Limits.disk is 0", hint="give a size, for instance '64M'")
        if memory is not None and parse_size(memory) < _LEAST_MEMORY:
            raise InvalidValue(f"Limits.memory is {memory!r}", hint="give 16M or more, or None for no limit")
        if cpu is not None and not (is_number(cpu) and 0.01 <= cpu <= _MOST_CPUS):  # NaN fails too
            raise InvalidValue(f"Limits.cpu is {cpu!r}", hint="give 0.01 or more CPUs, or None for no limit")
        if lifetime is not None and not (is_number(lifetime) and 0 < lifetime <= _LONGEST_LIFETIME):  # NaN fails too
            raise InvalidValue(f"Limits.lifetime is {lifetime!r}", hint="give a positive number of seconds, or None")
        put = object.__setattr__
        put(self, "memory", None if memory is None else parse_size(memory))
        put(self, "cpu", None if cpu is None else float(cpu))
        put(self, "inotify", inotify)
        put(self, "lifetime", None if lifetime is None else float(lifetime))
        put(self, "disk", parse_size(disk))
        put(self, "processes", processes)
        put(self, "open_files", open_files)
        put(self, "file_size", None if file_size is None else parse_size(file_size))
        put(self, "output", parse_size(output))


@dataclass(frozen=True, slots=True)
class Network:
    """The network access of a sandbox. Make one with :meth:`off`, :meth:`allow` or :meth:`host`.

    Attributes:
        mode: ``off``, ``allow`` or ``host``.
        hosts: with ``allow``: patterns of the allowed hosts, normalised.
        private: with ``allow``: whether those hosts may have private addresses.
    """

    mode: str = "off"
    hosts: tuple[str, ...] = ()
    private: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("off", "allow", "host"):
            raise InvalidValue(f"network {self.mode!r}", hint="use Network.off(), Network.allow(...) or Network.host()")
        if (self.mode == "allow") != bool(self.hosts):
            what = "Network.allow() names no host" if self.mode == "allow" else f"network {self.mode!r} takes no hosts"
            raise InvalidValue(what, hint="use Network.allow('example.org') for some hosts, Network.off() for none")
        if len(self.hosts) > _MOST_HOSTS:
            raise InvalidValue(
                f"Network.allow() has {len(self.hosts)} hosts, more than {_MOST_HOSTS}",
                hint="replace names below one domain by '*.example.org', which counts as one",
            )
        object.__setattr__(self, "hosts", tuple(dict.fromkeys(map(_checked_host, self.hosts))))

    @classmethod
    def off(cls) -> Network:
        """Return a network of only the sandbox's own loopback device, which is up."""
        return cls("off")

    @classmethod
    def allow(cls, *hosts: str, private: bool = False) -> Network:
        """Return a network of HTTP and HTTPS to these hosts, through a proxy that ``http_proxy`` and the like name.

        Args:
            hosts: each a name (``packages.example.org``), a wildcard (``*.example.org``), an IP address, or ``*`` for
                every host. With a port (``:8080``) any protocol is allowed on it; without, 80 for HTTP and 443 for TLS.
            private: whether the hosts may have loopback and private addresses, as a local package index does.
                Link-local addresses, such as a cloud's metadata service, are always refused.

        Raises:
            InvalidValue: there is no host, or a pattern is malformed.
        """
        return cls("allow", hosts, private)

    @classmethod
    def host(cls) -> Network:
        """Return the host's own network; for image builds."""
        return cls("host")


def _checked_host(pattern: str) -> str:
    """Normalise a pattern of :meth:`Network.allow`: lower case, A-labels, no trailing dot, ``[v6]:port``."""
    if type(pattern) is not str:  # not every caller is type-checked
        raise InvalidValue(f"host {pattern!r} is not a str")
    name, port = _split_port(pattern)
    name = name.removesuffix(".")
    if name == "*":
        return name + port
    wildcard, name = ("*.", name[2:]) if name.startswith("*.") else ("", name)
    try:
        if literal := _ip_literal(name):
            if wildcard:
                raise ValueError("there are no names below an IP address")
            return literal + port
        name = name.lower() if name.isascii() else name.encode("idna").decode("ascii").lower()
    except ValueError as error:
        raise InvalidValue(f"host {pattern!r}: {error}") from None
    if len(name) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise InvalidValue(
            f"{pattern!r} is not a host pattern",
            hint="give a name, '*.suffix', '*' or an IP address, optionally ':port'",
        )
    return wildcard + name + port


def _split_port(pattern: str) -> tuple[str, str]:
    """Split a pattern into the host and ``:port``, or an empty string without a port."""
    name, colon, port = pattern.rpartition(":")
    if not colon or pattern.endswith("]") or (":" in name and not name.endswith("]")):  # an IPv6 address alone
        return pattern, ""
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= _MOST_CHARACTERS:
        raise InvalidValue(f"host {pattern!r}: {port!r} is not a port", hint="give 1 to 65535, or leave out the ':'")
    return name, f":{int(port)}"


def _ip_literal(name: str) -> str:
    """Normalise an IP address, with brackets around IPv6; return an empty string for a name.

    Raises:
        ValueError: the text is not an IP address, but resolvers might take it for one.
    """
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    last = bare.rpartition(".")[2].lower()
    if ":" not in bare and not last.isdecimal() and not last.startswith("0x"):
        return ""
    address = ipaddress.ip_address(bare)
    if "%" in bare:
        raise ValueError("an address with a zone is link-local; link-local addresses are always refused")
    return str(address) if address.version == 4 else f"[{address}]"


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file shown inside a sandbox.

    Sockets and FIFOs in it stay connected to the host: code inside can connect to a unix socket and write to a FIFO.
    Code that can write above the target can rename a parent directory of it, as in every mount namespace; a target
    directly below ``/`` is safe from that.

    Attributes:
        source: absolute host path of a directory or regular file.
        target: absolute path inside; created if missing.
        read_only: must be True: a writable mount is refused at creation.
        below: absolute host paths of directories stacked under the source directory as an overlay; bottom first.
        upper: absolute host path of an empty directory that takes the writes, for sandboxes of builds alone; None:
            nothing can be written.
    """

    source: Path
    target: PurePosixPath
    read_only: bool = True
    below: tuple[Path, ...] = ()
    upper: Path | None = None

    def __post_init__(self) -> None:  # not every caller is type-checked
        rows = [("source", self.source, Path), ("target", self.target, PurePosixPath)]
        rows += [("upper", self.upper, Path)] if self.upper is not None else []
        if isinstance(self.below, tuple):
            rows += [(f"below[{number}]", path, Path) for number, path in enumerate(self.below)]
        for name, value, kind in (*rows, ("read_only", self.read_only, bool), ("below", self.below, tuple)):
            if not isinstance(value, kind):
                raise InvalidValue(f"Mount.{name} is of type {type(value).__name__}", hint=f"give a {kind.__name__}")


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """An image as the launcher sees it: produced by ``images``, consumed by ``sandbox``.

    Attributes:
        name: its name in messages and logs.
        layers: absolute host paths of read-only directory trees, bottom first, without mounts in them.
        environment: variables every command gets, captured when the image was built.
        workdir: the directory where commands start; made if it is missing.
        host_usr: whether the host's ``/usr`` (and ``/bin``, ``/lib`` and so on if they are directories) is shown.
        base_commit: the commit that ``Sandbox.patch`` compares with.
        clean: whether the repository at ``workdir`` equals that commit, ignored files apart: then git compares
            only the paths written since.
        user: as whom commands run that name no user: a name or uid, with ``:GROUP`` or without; "" for root. With one
            id all run as root.
        backend: what isolates it: "" for namespaces, a container engine of :data:`ENGINES`, or a plug-in.
        entrypoint: the program that an engine starts its containers with, and that a sandbox does not run.
        volumes: further directories that are made if they are missing.
    """

    name: str
    layers: tuple[Path, ...]
    environment: tuple[tuple[str, str], ...] = ()
    workdir: PurePosixPath = PurePosixPath("/")
    host_usr: bool = True
    base_commit: str = "HEAD"
    clean: bool = False
    user: str = ""
    backend: str = ""
    entrypoint: tuple[str, ...] = ()
    volumes: tuple[PurePosixPath, ...] = ()


class Outcome(enum.Enum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a command and its waited-for children used.

    Attributes:
        user: CPU seconds in user mode.
        system: CPU seconds in the kernel.
        max_rss: bytes of the largest resident set.
    """

    user: float = 0.0
    system: float = 0.0
    max_rss: int = 0


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. A non-zero exit, a signal and a timeout are values here, never exceptions.

    Attributes:
        command: the command, as given.
        outcome: exited, signaled or timeout.
        exit_code: 0 to 255 if it exited, else None.
        signal: the number of the signal that ended it, else None.
        stdout_bytes: the kept part of stdout: head and tail, and between them a line that counts the dropped bytes.
        stderr_bytes: the kept part of stderr, likewise.
        dropped_stdout: bytes of stdout that were not kept.
        dropped_stderr: bytes of stderr that were not kept.
        duration: wall seconds from start to the leader's end.
        usage: CPU and memory of the leader and the children it waited for.
        left_running: background processes of the command that were alive when its leader ended.
        limits_hit: which of the sandbox's limits were reached while it ran: ``memory`` (processes were killed for
            it), ``processes`` (a fork failed; only with control groups), ``disk`` (it is full; a watchdog may have
            ended the command), ``file_size`` (SIGXFSZ ended it, or its last command in a shell: status 153),
            ``output``. The kernel counts no refusals of open files, inotify instances or, without control groups,
            processes: only the program's own error (EAGAIN, EMFILE) shows those.
    """

    command: str | tuple[str, ...]
    outcome: Outcome
    exit_code: int | None
    signal: int | None
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    dropped_stdout: int = 0
    dropped_stderr: int = 0
    duration: float = 0.0
    usage: Usage = Usage()
    left_running: int = 0
    limits_hit: tuple[str, ...] = ()

    @property
    def stdout(self) -> str:
        """The kept part of stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The kept part of stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the command exited with status 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def fate(self) -> str:
        """How it ended, in words: ``exit status 2``, ``killed by SIGKILL``, ``timed out after 3.0 s``."""
        if self.outcome is Outcome.TIMEOUT:
            return f"timed out after {self.duration:.1f} s"
        if self.signal is not None:
            try:
                return f"killed by {_signal.Signals(self.signal).name}"
            except ValueError:  # real-time signals have numbers, not names
                return f"killed by signal {self.signal}"
        return f"exit status {self.exit_code}"

    def check(self) -> ExecResult:
        """Return self if the command exited with status 0.

        Raises:
            CommandFailed: it did not; the error carries this result.
        """
        if not self.ok:
            raise CommandFailed(self)
        return self


@dataclass(frozen=True, slots=True)
class ShellResult(ExecResult):
    """The result of a command in a stateful shell.

    Attributes:
        restarted: whether bash ended with it (``exit``, ``exec``, a failure under ``set -e``, a timeout). The next
            command gets a new bash: directory and files survive, variables, functions, options and aliases do not.
        cwd: the directory where the next command starts.
    """

    restarted: bool = False
    cwd: PurePosixPath = PurePosixPath("/")

    @property
    def replaced(self) -> bool:
        """The former name of ``restarted``."""
        return self.restarted


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a streaming process's output.

    Attributes:
        stream: ``stdout`` or ``stderr``; a pty has only ``stdout``.
        data: its bytes, unchanged.
    """

    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Terminal:
    """The size of a pty, in characters."""

    rows: int = 24
    columns: int = 80

    def __post_init__(self) -> None:
        for name, count in (("rows", self.rows), ("columns", self.columns)):
            if type(count) is not int or not 1 <= count <= _MOST_CHARACTERS:
                raise InvalidValue(f"Terminal.{name} is {count!r}", hint=f"give 1 to {_MOST_CHARACTERS}")


class FileType(enum.Enum):
    """The type of a file system entry."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The metadata of a path in a sandbox.

    Attributes:
        path: the path, absolute. Bytes of a name that are not UTF-8 are surrogate escapes (PEP 383).
        type: its type.
        size: bytes.
        mode: permission bits, with setuid, setgid and sticky.
        mtime: seconds since the epoch.
        uid: owner inside.
        gid: group inside.
        target: where a symbolic link points, else None.
    """

    path: PurePosixPath
    type: FileType
    size: int
    mode: int
    mtime: float
    uid: int
    gid: int
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """The result of a copy between host and sandbox.

    Attributes:
        files: regular files copied.
        size: bytes of their content, holes included.
        skipped: (path relative to the copied tree, reason) of each entry that was not copied.
    """

    files: int
    size: int
    skipped: tuple[tuple[str, str], ...] = ()


class ChangeKind(enum.Enum):
    """How a path differs from the image."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """One path of a sandbox that differs from its image.

    Attributes:
        path: the path, absolute.
        kind: added, modified (content, permissions, owner, link target or type differ) or deleted. Entries below an
            added or deleted directory are listed too.
        type: its type now, or before it was deleted.
    """

    path: PurePosixPath
    kind: ChangeKind
    type: FileType


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """The description of a live sandbox.

    Attributes:
        id: its name, unique on this machine.
        image: name of its image.
        owner: pid of the process that owns it.
        pid: host pid of its first process.
        created: seconds since the epoch.
        network: ``off``, ``allow`` or ``host``.
        labels: (key, value) pairs given at creation.
        expires: when its lifetime ends, in seconds since the epoch, or None.
        enforced: (limit, mechanism) for the limits that depend on the machine or on the upper: memory, processes, cpu,
            disk. A limit that is missing here is not enforced: ``disk`` with ``upper=``.
        upper: where its writes go: ``memory``; ``disk`` (the store's, on kernels before 6.6, whose tmpfs cannot take
            them: a watchdog counts files for ``Limits.disk``); ``given`` (``upper=``).
    """

    id: str
    image: str
    owner: int
    pid: int
    created: float
    network: str
    labels: tuple[tuple[str, str], ...] = ()
    expires: float | None = None
    enforced: tuple[tuple[str, str], ...] = ()
    upper: str = "memory"


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """The current resource usage of a sandbox.

    Attributes:
        cpu: CPU seconds of everything that ran in it, as far as its processes were waited for.
        memory: bytes resident in its processes (shared pages count once per process).
        disk: bytes written, counted against ``Limits.disk``.
        processes: live processes, without the sandbox's own.
    """

    cpu: float
    memory: int
    disk: int
    processes: int


@dataclass(frozen=True, slots=True)
class Refusals:
    """The requests that the proxy of a sandbox with :meth:`Network.allow` has refused.

    Attributes:
        count: how many requests.
        last: one line per recent refusal, oldest first; during a flood only a sample is logged.
    """

    count: int = 0
    last: tuple[str, ...] = ()
