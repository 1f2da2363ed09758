"""Define the value types that all packages share: frozen classes that only validate and convert their fields."""

from __future__ import annotations

import enum
import ipaddress
import re
import signal as _signal
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.errors import CommandFailed, InvalidValue
from minisandbox.values import (  # noqa: F401 - users import these names from here
    MAX_SIZE,
    WORKDIR,
    GiB,
    JSONValue,
    KiB,
    MiB,
    human_size,
    parse_size,
)

_MAX_UINT16 = 0xFFFF
_MAX_CPUS = 100_000
_MIN_OPEN_FILES = 16  # with fewer, a sandbox cannot start a command
_MIN_MEMORY = 16 * MiB
_MAX_LIFETIME = 1e8
ENGINES = ("podman", "docker")  # values of ImageSpec.backend
LIMITS_HIT = ("memory", "processes", "disk", "file_size", "output")
"""The values that can appear in :attr:`ExecResult.limits_hit`."""
_MAX_HOSTS = 512
_MAX_HOST_NAME = 253
_LABEL = re.compile("[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


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
            If the sandbox writes to the store's disk (``info().upper``), a watchdog enforces the limit: a command can
            exceed it for about a second before it is killed. With ``upper=`` this must be the default, and limits only
            ``/tmp``, ``/run`` and ``/dev/shm``: the upper directory may fill its disk.
        processes: how many processes and threads may exist at once.
        open_files: open descriptors per process, at least 16.
        file_size: apparent size in bytes of one file, holes included, in memory (memfd_create(2)) as on disk.
            Exceeding it raises SIGXFSZ, or EFBIG if that is ignored. None: no limit.
        output: bytes kept of each of a command's stdout and stderr (half from the head, half from the tail).
        inotify: inotify instances that may exist at once.
        lifetime: seconds after which the sandbox is stopped, even if its owner hangs. Snapshots and resets do not
            extend it; each fork has its own. None: the sandbox lives until it is stopped or its owner exits.
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
        counts = {"processes": processes, "open_files": open_files, "inotify": inotify}
        for name, count in counts.items():
            if type(count) is not int or not 1 <= count <= MAX_SIZE:  # True is an int too
                raise InvalidValue(f"Limits.{name} is {count!r}", hint="give a positive int")
        if open_files < _MIN_OPEN_FILES:
            raise InvalidValue(
                f"Limits.open_files is {open_files}",
                reason=f"no command can start with fewer than {_MIN_OPEN_FILES}",
                hint=f"give {_MIN_OPEN_FILES} or more",
            )
        if parse_size(disk) == 0:  # tmpfs(5) takes 0 as no limit
            raise InvalidValue("Limits.disk is 0", hint="give a size, for instance '64M'")
        if memory is not None and parse_size(memory) < _MIN_MEMORY:
            raise InvalidValue(f"Limits.memory is {memory!r}", hint="give 16M or more, or None for no limit")
        if cpu is not None and not (is_number(cpu) and 0.01 <= cpu <= _MAX_CPUS):  # NaN fails too
            raise InvalidValue(f"Limits.cpu is {cpu!r}", hint="give 0.01 or more CPUs, or None for no limit")
        if lifetime is not None and not (is_number(lifetime) and 0 < lifetime <= _MAX_LIFETIME):  # NaN fails too
            raise InvalidValue(f"Limits.lifetime is {lifetime!r}", hint="give a positive number of seconds, or None")
        sizes = {"memory": memory, "disk": disk, "file_size": file_size, "output": output}
        byte_counts = {name: None if size is None else parse_size(size) for name, size in sizes.items()}
        optional = {"cpu": cpu, "lifetime": lifetime}
        numbers = {name: None if number is None else float(number) for name, number in optional.items()}
        for name, limit in (counts | byte_counts | numbers).items():
            object.__setattr__(self, name, limit)


@dataclass(frozen=True, slots=True)
class Network:
    """The network access of a sandbox. Create it with :meth:`off`, :meth:`allow` or :meth:`host`.

    Attributes:
        mode: ``off``, ``allow`` or ``host``.
        hosts: normalised patterns of the hosts that ``allow`` permits.
        private: whether hosts that ``allow`` permits may have private addresses.
        server: whether requests to the proxy itself, ``http://127.0.0.1:3128``, go to the only host, an HTTP server.
    """

    mode: str = "off"
    hosts: tuple[str, ...] = ()
    private: bool = False
    server: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("off", "allow", "host"):
            raise InvalidValue(f"network {self.mode!r}", hint="use Network.off(), Network.allow(...) or Network.host()")
        if (self.mode == "allow") != bool(self.hosts):
            fault = "Network.allow() names no host" if self.mode == "allow" else f"network {self.mode!r} takes no hosts"
            raise InvalidValue(fault, hint="use Network.allow('example.org') for some hosts, Network.off() for none")
        if len(self.hosts) > _MAX_HOSTS:
            raise InvalidValue(
                f"Network.allow() has {len(self.hosts)} hosts, more than {_MAX_HOSTS}",
                hint="replace names below one domain by '*.example.org', which counts as one",
            )
        object.__setattr__(self, "hosts", tuple(dict.fromkeys(map(_checked_host, self.hosts))))

    @classmethod
    def off(cls) -> Network:
        """Return a network that has only a loopback device, which is up."""
        return cls("off")

    @classmethod
    def allow(cls, *hosts: str, private: bool = False) -> Network:
        """Return a network that permits HTTP and HTTPS to the given hosts, through a proxy named by ``http_proxy`` etc.

        Args:
            hosts: names (``packages.example.org``), wildcards (``*.example.org``), IP addresses, or ``*`` for every
                host. With a port (``:8080``), any protocol is permitted; without, port 80 for HTTP and 443 for TLS.
            private: whether the hosts may have loopback and private addresses, for example a local package index.
                Link-local addresses, which cloud metadata services use, are always refused.

        Raises:
            InvalidValue: there is no host, or a pattern is malformed.
        """
        return cls("allow", hosts, private)

    @classmethod
    def host(cls) -> Network:
        """Return the unrestricted network of the host, which image builds use."""
        return cls("host")


def _checked_host(pattern: str) -> str:
    """Normalise a pattern of :meth:`Network.allow`: lower case, A-labels, no trailing dot, ``[v6]:port``."""
    if type(pattern) is not str:  # users may pass other types
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
    if len(name) > _MAX_HOST_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise InvalidValue(
            f"{pattern!r} is not a host pattern",
            hint="give a name, '*.suffix', '*' or an IP address, optionally ':port'",
        )
    return wildcard + name + port


def _split_port(pattern: str) -> tuple[str, str]:
    """Split a pattern into the host and ``:port``, or an empty string without a port."""
    name, colon, port = pattern.rpartition(":")
    if not colon or pattern.endswith("]") or (":" in name and not name.endswith("]")):  # no port, or bare IPv6
        return pattern, ""
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= _MAX_UINT16:
        raise InvalidValue(f"host {pattern!r}: {port!r} is not a port", hint="give 1 to 65535, or leave out the ':'")
    return name, f":{int(port)}"


def _ip_literal(name: str) -> str:
    """Normalise an IP address, with brackets around IPv6; return an empty string for a name.

    Raises:
        ValueError: the text is not an IP address, but resolvers might take it for one.
    """
    text = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    last_label = text.rpartition(".")[2].lower()
    if ":" not in text and not last_label.isdecimal() and not last_label.startswith("0x"):
        return ""
    address = ipaddress.ip_address(text)
    if "%" in text:
        raise ValueError("an address with a zone is link-local; link-local addresses are always refused")
    return str(address) if address.version == 4 else f"[{address}]"


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file that is mounted in a sandbox.

    Sockets and FIFOs in it stay connected to the host: code in the sandbox can connect to a unix socket and write to a
    FIFO. As in every mount namespace, code that may write to the parents of the target can rename them. A target
    directly below ``/`` is safe from renames.

    Attributes:
        source: absolute host path of a directory or regular file.
        target: absolute path in the sandbox, created if missing.
        read_only: must be True; the creation of a sandbox rejects a writable mount.
        below: absolute host paths of directories stacked under the source directory as an overlay, bottom first.
        upper: absolute host path of an empty overlay upper directory, only for build sandboxes; None makes the mount
            read-only.
    """

    source: Path
    target: PurePosixPath
    read_only: bool = True
    below: tuple[Path, ...] = ()
    upper: Path | None = None

    def __post_init__(self) -> None:  # users may pass other types
        paths = [("source", self.source, Path), ("target", self.target, PurePosixPath)]
        paths += [("upper", self.upper, Path)] if self.upper is not None else []
        if isinstance(self.below, tuple):
            paths += [(f"below[{index}]", path, Path) for index, path in enumerate(self.below)]
        for name, value, type_ in (*paths, ("read_only", self.read_only, bool), ("below", self.below, tuple)):
            if not isinstance(value, type_):
                raise InvalidValue(f"Mount.{name} is of type {type(value).__name__}", hint=f"give a {type_.__name__}")


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """The properties of an image that a sandbox needs; ``images`` creates it, and ``sandbox`` uses it.

    Attributes:
        name: name of the image in messages and logs.
        layers: absolute host paths of read-only directory trees, bottom first, without mounts in them.
        environment: environment variables of every command, captured when the image was built.
        workdir: working directory of commands, created if missing.
        host_usr: whether to mount the host's ``/usr`` (and ``/bin``, ``/lib`` and so on if they are directories).
        base_commit: the commit that ``Sandbox.patch`` compares with.
        clean: whether the repository at ``workdir`` equals ``base_commit``, except for ignored files. If so, git
            compares only the paths that the sandbox has written.
        user: default user of commands: a name or uid, optionally with ``:GROUP``; "" for root. If the sandbox has only
            one user id, all commands run as root.
        backend: isolation backend: "" for namespaces, a container engine of :data:`ENGINES`, or a plug-in.
        entrypoint: the entrypoint of the container image, which engines start, and sandboxes if a task needs it.
        volumes: further directories, created if missing.
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
    """The resources that a command and its reaped children used.

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
        exit_code: 0 to 255 if the command exited; otherwise None.
        signal: number of the signal that killed the command; otherwise None.
        stdout_bytes: the kept head and tail of stdout, with a line between them that counts the dropped bytes.
        stderr_bytes: the kept head and tail of stderr, in the same form.
        dropped_stdout: number of dropped bytes of stdout.
        dropped_stderr: number of dropped bytes of stderr.
        duration: wall seconds from the start to the exit of the command's first process.
        usage: CPU and memory of the command's first process and the children that it reaped.
        left_running: number of background processes that were alive when the first process exited.
        limits_hit: limits of the sandbox that were reached while the command ran: ``memory`` (processes were killed),
            ``processes`` (a fork failed; only with control groups), ``disk`` (it is full; a watchdog may have killed
            the command), ``file_size`` (SIGXFSZ killed the command, or its last command in a shell: status 153),
            ``output``. The limits of open files, inotify instances and, without control groups, processes never appear
            here, because the kernel does not count their hits. The program gets EAGAIN or EMFILE.
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
        """The outcome in words: ``exit status 2``, ``killed by SIGKILL``, ``timed out after 3.0 s``."""
        if self.outcome is Outcome.TIMEOUT:
            return f"timed out after {self.duration:.1f} s"
        if self.signal is not None:
            try:
                return f"killed by {_signal.Signals(self.signal).name}"
            except ValueError:  # real-time signals have numbers, not names
                return f"killed by signal {self.signal}"
        return f"exit status {self.exit_code}"

    @property
    def shell_status(self) -> int | None:
        """The status that a shell reports: the exit code, or 128 plus the signal's number; None after a timeout."""
        return self.exit_code if self.signal is None else 128 + self.signal

    def check(self) -> ExecResult:
        """Return self if the command exited with status 0.

        Raises:
            CommandFailed: the command failed; the error contains this result.
        """
        if not self.ok:
            raise CommandFailed(self)
        return self


@dataclass(frozen=True, slots=True)
class ShellResult(ExecResult):
    """The result of a command in a stateful shell.

    Attributes:
        restarted: whether the command ended bash (``exit``, ``exec``, a failure under ``set -e``, a timeout). The next
            command runs in a new bash in the same directory; variables, functions, options and aliases are lost.
        cwd: working directory of the next command.
    """

    restarted: bool = False
    cwd: PurePosixPath = PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a streaming process's output.

    Attributes:
        stream: ``stdout`` or ``stderr``; a pty has only ``stdout``.
        data: the unchanged bytes.
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
            if type(count) is not int or not 1 <= count <= _MAX_UINT16:
                raise InvalidValue(f"Terminal.{name} is {count!r}", hint=f"give 1 to {_MAX_UINT16}")


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
        path: absolute path. Bytes of a name that are not UTF-8 are surrogate escapes (PEP 383).
        type: type of the file.
        size: size in bytes.
        mode: permission bits, with setuid, setgid and sticky.
        mtime: seconds since the epoch.
        uid: owner in the sandbox.
        gid: group in the sandbox.
        target: target of a symbolic link; otherwise None.
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
        files: number of copied regular files.
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
        path: absolute path.
        kind: added, modified (content, permissions, owner, link target or type differ) or deleted. Entries below an
            added or deleted directory are listed too.
        type: the current type, or the type before the deletion.
    """

    path: PurePosixPath
    kind: ChangeKind
    type: FileType


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """The description of a live sandbox.

    Attributes:
        id: id of the sandbox, unique on this machine.
        image: name of the image.
        owner: pid of the process that owns the sandbox.
        pid: host pid of the sandbox's first process.
        created: seconds since the epoch when the sandbox was created.
        network: ``off``, ``allow`` or ``host``.
        labels: (key, value) pairs given at creation.
        expires: seconds since the epoch when the lifetime ends, or None.
        enforced: (limit, mechanism) for the limits that depend on the machine or on the upper directory: memory,
            processes, cpu, disk. A limit that is missing here is not enforced, for example ``disk`` with ``upper=``.
        upper: location of the overlay upper directory: ``memory``; ``disk`` (in the store, on kernels before 6.6, whose
            tmpfs does not support it; a watchdog enforces ``Limits.disk``); ``given`` (``upper=``).
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
        cpu: CPU seconds of all processes; exited processes count only if they were reaped.
        memory: resident bytes of all processes (shared pages count once per process).
        disk: written bytes, which count against ``Limits.disk``.
        processes: number of live processes, without the sandbox's init process and workers.
    """

    cpu: float
    memory: int
    disk: int
    processes: int


@dataclass(frozen=True, slots=True)
class Refusals:
    """The requests that the proxy of a sandbox with :meth:`Network.allow` has refused.

    Attributes:
        count: number of refused requests.
        last: one line for each recent refusal, oldest first; during a flood, only a sample.
    """

    count: int = 0
    last: tuple[str, ...] = ()
