"""Values shared by every package: limits, network, mounts, images as the launcher sees them, results.

Everything here is frozen and free of behaviour beyond checking and converting itself.
"""

from __future__ import annotations

import enum
import ipaddress
import re
import signal as _signal
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.errors import CommandFailed, InvalidValue

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_MOST = 1 << 62
_MOST_CHARACTERS = 0xFFFF
_MOST_CPUS = 100_000
_FEWEST_FILES = 16
"""Open files without which a sandbox's own processes cannot start a command."""
_LEAST_MEMORY = 16 * MiB
_LONGEST_LIFETIME = 1e8
WORKDIR = PurePosixPath("/testbed")
"""Where a built image has its repository."""
LIMITS_HIT = ("memory", "processes", "disk", "file_size", "output")
"""What :attr:`ExecResult.limits_hit` can name."""

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
        InvalidValue: the text is not a size, or the size is negative or larger than the kernel takes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MOST:
            raise InvalidValue(f"size {value} is negative or too large", hint="give bytes, or text such as '2G'")
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise InvalidValue(f"{value!r} is not a size", hint="give bytes as an int, or text such as '512M' or '2G'")
    size = float(match[1]) * _UNIT[match[2].upper()]
    if size > _MOST:
        raise InvalidValue(f"size {value!r} is more than any kernel takes", hint=f"give at most {_MOST} bytes")
    return int(size)


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, init=False)
class Limits:
    """What one sandbox may use. Every limit given here is enforced, or creation fails.

    Attributes:
        memory: bytes that all processes together may hold; with control groups, what is written to memory (``disk``)
            counts too. None: no limit.
        cpu: how many CPUs may be busy at once, 0.01 or more; needs control groups. None: no limit.
        disk: bytes that all writes together may take (the size of the tmpfs upper, ``/tmp`` and ``/dev/shm`` included).
            With an upper on disk (``upper=``) only the default can be had, and holds for ``/tmp``, ``/run`` and
            ``/dev/shm`` alone: the upper is limited by its disk.
        processes: how many processes and threads may exist at once.
        open_files: open descriptors per process, at least 16.
        file_size: bytes that one file may seem to have, holes included, in memory (memfd_create(2)) as on the disk;
            whoever goes beyond is ended by SIGXFSZ, or meets EFBIG. None: no limit.
        output: bytes kept of each of a command's stdout and stderr (half from the head, half from the tail).
        inotify: inotify instances that may exist at once.
        lifetime: seconds after which it ends by itself, whatever happens to its owner, snapshots and resets of it
            included; forks begin their own. None: when it is stopped, or the process that made it ends.
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
                reason=f"no command can be started with less than {_FEWEST_FILES}",
                hint=f"give {_FEWEST_FILES} or more",
            )
        if parse_size(disk) == 0:  # of a tmpfs, 0 means no limit (tmpfs(5))
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
    """What a sandbox can reach. Make one with :meth:`off`, :meth:`allow` or :meth:`host`.

    Attributes:
        mode: ``off``, ``allow`` or ``host``.
        hosts: with ``allow``: the patterns of what can be reached, in one spelling.
        private: with ``allow``: whether what they name may have private addresses.
    """

    mode: str = "off"
    hosts: tuple[str, ...] = ()
    private: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("off", "allow", "host"):
            raise InvalidValue(f"network {self.mode!r}", hint="use Network.off(), Network.allow(...) or Network.host()")
        if (self.mode == "allow") != bool(self.hosts):
            what = "Network.allow() has no host" if self.mode == "allow" else f"network {self.mode!r} has hosts"
            raise InvalidValue(what, hint="Network.allow('example.org') for some hosts, Network.off() for none")
        if len(self.hosts) > _MOST_HOSTS:
            raise InvalidValue(
                f"Network.allow() has {len(self.hosts)} hosts, more than {_MOST_HOSTS}",
                hint="replace names below one domain by '*.example.org', which counts as one",
            )
        object.__setattr__(self, "hosts", tuple(dict.fromkeys(map(_checked_host, self.hosts))))

    @classmethod
    def off(cls) -> Network:
        """Loopback only, up, and private to the sandbox."""
        return cls("off")

    @classmethod
    def allow(cls, *hosts: str, private: bool = False) -> Network:
        """Nothing but HTTP and HTTPS to these hosts, through a proxy; programs find it in ``http_proxy`` and the like.

        Args:
            hosts: each a name (``packages.example.org``), every name below one (``*.example.org``) or an IP address,
                with a port (``:8080``), which then carries anything, or without (80 for HTTP and 443 for TLS).
            private: whether they may have loopback and private addresses, such as a package index of one's own.
                Link-local ones, a cloud's metadata service among them, are refused even so.

        Raises:
            InvalidValue: there is no host, or one is no such pattern.
        """
        return cls("allow", hosts, private)

    @classmethod
    def host(cls) -> Network:
        """The host's own network; for image builds."""
        return cls("host")


def _checked_host(pattern: str) -> str:
    """A pattern of :meth:`Network.allow` in one spelling: lower case, A-labels, no trailing dot, ``[v6]:port``."""
    if type(pattern) is not str:  # callers are not all checked by mypy
        raise InvalidValue(f"host {pattern!r} is not a text")
    name, port = _split_port(pattern)
    name = name.removesuffix(".")
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
            f"{pattern!r} is no host name", hint="give a name, '*.suffix' or an IP address, then ':port' or nothing"
        )
    return wildcard + name + port


def _split_port(pattern: str) -> tuple[str, str]:
    """What comes before the port, and ``:port`` or nothing."""
    name, colon, port = pattern.rpartition(":")
    if not colon or pattern.endswith("]") or (":" in name and not name.endswith("]")):  # an IPv6 address alone
        return pattern, ""
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= _MOST_CHARACTERS:
        raise InvalidValue(f"host {pattern!r}: {port!r} is no port", hint="give 1 to 65535, or leave out the ':'")
    return name, f":{int(port)}"


def _ip_literal(name: str) -> str:
    """An IP address in its one spelling, a v6 one in brackets, or nothing for a name.

    Raises:
        ValueError: it is no IP address, but resolvers might take it for one.
    """
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    last = bare.rpartition(".")[2].lower()
    if ":" not in bare and not last.isdecimal() and not last.startswith("0x"):
        return ""
    address = ipaddress.ip_address(bare)
    if "%" in bare:
        raise ValueError("an address with a zone is link-local, which is always refused")
    return str(address) if address.version == 4 else f"[{address}]"


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file shown inside a sandbox.

    What is in it is the host's own: code inside can connect to a unix socket there, and write to a FIFO. Whoever may
    write above the target can rename a directory on the way to it, as in every mount namespace; one right below ``/``
    stays where it is.

    Attributes:
        source: absolute host path of a directory or regular file.
        target: absolute path inside; made if it is not there.
        read_only: only reading is supported so far; a writable mount is refused at creation.
        below: absolute host paths of directories that show where the source, a directory, has nothing; bottom first.
    """

    source: Path
    target: PurePosixPath
    read_only: bool = True
    below: tuple[Path, ...] = ()

    def __post_init__(self) -> None:  # callers are not all checked by mypy
        rows = [("source", self.source, Path), ("target", self.target, PurePosixPath)]
        if isinstance(self.below, tuple):
            rows += [(f"below[{number}]", path, Path) for number, path in enumerate(self.below)]
        for name, value, kind in (*rows, ("read_only", self.read_only, bool), ("below", self.below, tuple)):
            if not isinstance(value, kind):
                raise InvalidValue(f"Mount.{name} is of type {type(value).__name__}", hint=f"give a {kind.__name__}")


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """An image as the launcher sees it: produced by ``images``, consumed by ``sandbox``.

    Attributes:
        name: what people and logs call it.
        layers: absolute host paths of read-only directory trees, bottom first, without mounts in them.
        environment: variables every command gets, captured when the image was built.
        workdir: where commands start.
        host_usr: whether the host's ``/usr`` (and ``/bin``, ``/lib`` and so on where they are directories) is shown.
        base_commit: the commit that ``Sandbox.patch`` compares with.
        clean: whether the repository at ``workdir`` is that commit, but for what git ignores: then git is asked for a
            patch of what was written since, and of nothing else.
    """

    name: str
    layers: tuple[Path, ...]
    environment: tuple[tuple[str, str], ...] = ()
    workdir: PurePosixPath = PurePosixPath("/")
    host_usr: bool = True
    base_commit: str = "HEAD"
    clean: bool = False


class Outcome(enum.Enum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command and its waited-for children used.

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
    """A command's fate. A non-zero exit, a signal and a timeout are values here, never exceptions.

    Attributes:
        command: what was run, as given.
        outcome: exited, signaled or timeout.
        exit_code: 0 to 255 where it exited, else None.
        signal: the number of the signal that ended it, else None.
        stdout_bytes: what was kept of its output (head and tail, with a line between that counts what is missing).
        stderr_bytes: the same of its errors.
        dropped_stdout: bytes of stdout that were not kept.
        dropped_stderr: bytes of stderr that were not kept.
        duration: wall seconds from start to the leader's end.
        usage: CPU and memory of the leader and the children it waited for.
        left_running: background processes of the command that were alive when its leader ended.
        limits_hit: which of the sandbox's limits refused something while it ran: ``memory`` (processes were killed for
            it), ``processes`` (a fork failed; told where control groups count it), ``disk`` (it is full), ``file_size``
            (SIGXFSZ ended it, or a shell says so of its last command by status 153), ``output``. Of the others the
            kernel counts no refusals: too many processes without control groups, open files and inotify instances show
            in the program's own error alone (EAGAIN, EMFILE).
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
        """The kept output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The kept errors as text; bytes that are not UTF-8 become U+FFFD."""
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
    """A command's fate in a stateful shell.

    Attributes:
        replaced: whether bash had to be started anew after it (``exit``, ``exec``, a timeout that killed it); what
            of its state was carried over is said by :meth:`minisandbox.Shell.run`.
        cwd: where the next command starts.
    """

    replaced: bool = False
    cwd: PurePosixPath = PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a streaming process's output.

    Attributes:
        stream: ``stdout`` or ``stderr``; a pty has only ``stdout``.
        data: its bytes, as they came.
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
    """What a path names."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a sandbox's file system says about a path.

    Attributes:
        path: the path, absolute. Bytes of a name that are not UTF-8 are surrogate escapes (PEP 383).
        type: what it is.
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
    """What a copy between host and sandbox did.

    Attributes:
        files: regular files copied.
        size: bytes of their content, holes included.
        skipped: (path relative to the copied tree, why) of what was left out.
    """

    files: int
    size: int
    skipped: tuple[tuple[str, str], ...] = ()


class ChangeKind(enum.Enum):
    """What happened to a path since the image."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """One path of a sandbox that differs from its image.

    Attributes:
        path: the path, absolute.
        kind: added, modified (content, permissions, owner, link target or type differ) or deleted. What lies below an
            added or deleted directory is listed too.
        type: what it is now, or was if deleted.
    """

    path: PurePosixPath
    kind: ChangeKind
    type: FileType


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What is known about a live sandbox.

    Attributes:
        id: its name, unique on this machine.
        image: name of its image.
        owner: pid of the process that owns it.
        pid: host pid of its first process.
        created: seconds since the epoch.
        network: ``off``, ``allow`` or ``host``.
        labels: what its maker calls it.
        expires: seconds since the epoch when it ends by itself, or None.
        enforced: (limit, by what) for those that depend on the machine or on an upper: memory, processes, cpu, disk.
            One that is not named holds nothing: of an upper on disk, ``disk``.
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


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """What a sandbox uses right now.

    Attributes:
        cpu: CPU seconds of everything that ran in it, as far as its processes were waited for.
        memory: bytes resident in its processes (pages that several share count for each).
        disk: bytes written, of ``Limits.disk``.
        processes: live processes, our own left out.
    """

    cpu: float
    memory: int
    disk: int
    processes: int


@dataclass(frozen=True, slots=True)
class Refusals:
    """What the proxy of a sandbox with :meth:`Network.allow` has refused.

    Attributes:
        count: how many requests.
        last: a line for each of the latest that were told, oldest first; of a flood only some are.
    """

    count: int = 0
    last: tuple[str, ...] = ()
