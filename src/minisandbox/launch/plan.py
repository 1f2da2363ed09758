"""Describe the filesystem of a sandbox as a list of mount operations; pure data that never touches the kernel.

The controller builds a plan and sends it to the zygote as JSON; :mod:`.kernel.mounts` executes it. A plan has three
parts. Its *preparations* are the same for almost every plan, so they run before there is a request. Its *takes* open
host paths in the launcher's mount namespace. Its *operations* combine the two in the sandbox's. The terms:

* *slot*: a short neutral name ("0", "1", "usr") for a host tree. Host paths appear only in :class:`Take`, so the mount
  table of the sandbox shows slots instead of host paths.
* *scratch*: one tmpfs per sandbox that holds its mount points, its upper, ``/tmp``, ``/run``, ``/dev`` and
  ``/dev/shm``, so that its size is the quota for all writes. Paths in operations are relative to its root.
* *disk upper*: a directory on the store's disk, bound into scratch as the overlay's upper, for kernels that refuse a
  tmpfs there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import cast

INOTIFY = 32
"""Default limit of inotify instances per sandbox; the kernel's default is 128 per user (inotify(7))."""
PROCESSES = 1032
"""Default limit of processes per sandbox, pid 1 and workers included."""

ROOT = "root"
"""Scratch path of the sandbox's future root directory."""
BYTES_PER_FILE = 4096
"""Bytes of scratch per inode: a tmpfs of this many bytes more may hold one more file."""


@dataclass(frozen=True, slots=True)
class Take:
    """Hold a private copy of the mount at a host path under a slot.

    Attributes:
        source: absolute host path of a directory or file.
        slot: slot of the copy.
        owners: ``image``: files of the layers' owner appear as uid 0 inside; ``host``: owners stay unchanged.
        read_only: whether the copy is mounted read-only.
        recursive: whether mounts below the path are copied too.
        devices: whether device files in the copy can be opened.
    """

    source: str
    slot: str
    owners: str = "image"
    read_only: bool = True
    recursive: bool = False
    devices: bool = False

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"take {self.source} as {self.slot} ({'ro' if self.read_only else 'rw'}, owners: {self.owners})"


@dataclass(frozen=True, slots=True)
class Given:
    """Hold a sealed upper of another sandbox, which the zygote passes along with the plan.

    Attributes:
        number: index among the trees passed.
        slot: slot of the tree.
    """

    number: int
    slot: str

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"take sealed tree {self.number} as {self.slot} (ro, owners: image)"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Mount the scratch tmpfs and make it the working directory.

    Attributes:
        size: bytes it may hold.
    """

    size: int

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"make a scratch tmpfs of {self.size} bytes"


@dataclass(frozen=True, slots=True)
class Resize:
    """Resize the scratch tmpfs.

    Attributes:
        size: bytes it may hold.
    """

    size: int

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"limit the scratch tmpfs to {self.size} bytes"


@dataclass(frozen=True, slots=True)
class DiskUpper:
    """Hold a directory on the store's disk as the overlay's upper; like scratch, it can outlive the sandbox.

    Attributes:
        source: absolute host path of an empty directory.
        slot: slot of the directory.
    """

    source: str
    slot: str

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"take {self.source} as {self.slot} (rw, for what is written)"


@dataclass(frozen=True, slots=True)
class Directory:
    """Make a directory in scratch, owned by the sandbox's uid 0."""

    path: str
    mode: int = 0o755

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"make directory {self.path} ({self.mode:04o})"


@dataclass(frozen=True, slots=True)
class Attach:
    """Mount a slot or, with ``source``, bind a scratch directory at a path; create a missing mount point.

    No component of ``path`` may be a symbolic link: image content must not redirect a mount.

    Attributes:
        path: scratch path of the mount point.
        slot: slot to mount, or "".
        source: scratch path to bind, or "".
    """

    path: str
    slot: str = ""
    source: str = ""

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"attach {self.slot or self.source} at {self.path}"


@dataclass(frozen=True, slots=True)
class Move:
    """Move a mount and all mounts below it; the rules for ``path`` are those of :class:`Attach`.

    Attributes:
        path: scratch path of the new mount point.
        source: scratch path of the mount.
    """

    path: str
    source: str

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"move {self.source} to {self.path}"


@dataclass(frozen=True, slots=True)
class Overlay:
    """Mount an overlay.

    Attributes:
        path: scratch path to mount it at.
        lowers: scratch paths of the lower directories, topmost first.
        upper: scratch path of the upper directory; "" for a read-only overlay, which needs two lowers.
        work: scratch path of the work directory, on the same file system as ``upper``.
        volatile: whether the kernel skips syncing to disk, for an upper that is discarded after a crash.
    """

    path: str
    lowers: tuple[str, ...]
    upper: str
    work: str
    volatile: bool = False

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"mount an overlay of {len(self.lowers)} lower directories at {self.path}"


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """Mount a tmpfs that every user inside may write to.

    Attributes:
        path: scratch path to mount it at.
        size: bytes it may hold; 0: the kernel's default.
        shown: paths below ``path`` whose current content is mounted into the tmpfs.
    """

    path: str
    size: int = 0
    shown: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"mount a tmpfs at {self.path}"


@dataclass(frozen=True, slots=True)
class Devices:
    """Create the standard device files in a scratch directory, and mount a devpts of the sandbox's own."""

    path: str

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"make devices in {self.path}"


@dataclass(frozen=True, slots=True)
class Proc:
    """Mount the proc file system of the sandbox's process namespace.

    Attributes:
        path: scratch path to mount it at.
        hidden: names in it to cover with an empty file or directory; names that this kernel lacks are skipped.
        frozen: names in it to make read-only; names that this kernel lacks are skipped.
    """

    path: str
    hidden: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"mount proc at {self.path}, {len(self.hidden)} names hidden, {len(self.frozen)} read-only"


@dataclass(frozen=True, slots=True)
class Cover:
    """Cover forbidden paths with an empty read-only file or directory; skip paths that no longer exist."""

    paths: tuple[str, ...]

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"cover {len(self.paths)} sockets, FIFOs and closed directories"


@dataclass(frozen=True, slots=True)
class File:
    """Write a small file in scratch, owned by the sandbox's uid 0."""

    path: str
    text: str
    mode: int = 0o644

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"write {self.path}"


@dataclass(frozen=True, slots=True)
class Name:
    """Set the hostname; if the kernel refuses, make the current hostname resolve through ``run/hosts``."""

    hostname: str

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"call it {self.hostname}"


@dataclass(frozen=True, slots=True)
class Complete:
    """Create directories that the image configuration names but the image lacks, as container engines do.

    Symbolic links are resolved as inside the sandbox. A directory that cannot be created stays missing.

    Attributes:
        root: scratch path of the root directory.
        paths: absolute paths inside.
    """

    root: str
    paths: tuple[str, ...]

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"make {', '.join(self.paths)} where missing"


@dataclass(frozen=True, slots=True)
class Enter:
    """Make a scratch directory the root directory, and detach the host's root (pivot_root(2))."""

    path: str

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"make {self.path} the root directory"


Operation = (
    Take
    | Given
    | Scratch
    | Resize
    | DiskUpper
    | Directory
    | Attach
    | Move
    | Overlay
    | Tmpfs
    | Devices
    | Proc
    | Cover
    | File
    | Name
    | Complete
    | Enter
)
_KINDS: dict[str, type[Operation]] = {kind.__name__: kind for kind in Operation.__args__}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the launcher needs to create one sandbox.

    Attributes:
        preparations: operations that do not depend on the image, in order.
        takes: host trees that the sandbox shows.
        operations: operations that use both, in order.
        network: ``off`` (a network namespace with only a loopback interface), ``allow`` (the same, with a listening
            socket for a proxy) or ``host``.
        rlimits: (name without ``RLIMIT_``, value) pairs for every command, soft and hard.
        lifetime: milliseconds after which the sandbox is stopped; 0: never.
        expects_commands: whether a command follows at once, so that pid 1 forks a worker in advance.
        memory: memory limit in bytes that pid 1 enforces if no control group does; 0: none.
        disk: limit in bytes that pid 1 enforces on a disk upper; 0: none.
        inotify: limit of inotify instances in the user namespace.
        processes: limit of processes for all ids of the sandbox together, if no control group counts them.
        group_limits: (name, amount) for the control group (:meth:`.kernel.cgroups.Cgroup.limit`).
        one_id: whether the sandbox has a single uid if it would share further ids with the caller's other sandboxes.
        pretend_owners: whether changes of file owners and ids do nothing but return success.
    """

    preparations: tuple[Operation, ...]
    takes: tuple[Take | Given | DiskUpper, ...]
    operations: tuple[Operation, ...]
    network: str = "off"
    rlimits: tuple[tuple[str, int], ...] = ()
    lifetime: int = 0
    memory: int = 0
    inotify: int = INOTIFY
    processes: int = PROCESSES
    group_limits: tuple[tuple[str, int], ...] = ()
    expects_commands: bool = True
    disk: int = 0
    one_id: bool = False
    pretend_owners: bool = False

    def describe(self) -> str:
        """Return the plan as numbered lines, for the user and for error messages."""
        operations = (*self.preparations, *self.takes, *self.operations)
        lines = [f"{number}. {operation.describe()}" for number, operation in enumerate(operations, 1)]
        lines.append(f"network: {self.network}")
        lines.append("limits: " + ", ".join(f"{name}={value}" for name, value in self.rlimits))
        return "\n".join(lines)

    @lru_cache(maxsize=8)  # noqa: B019 - plans are small, and forks share one
    def to_json(self) -> bytes:
        """Serialise the plan for setup workers, the preparations on a separate line; :meth:`from_json` reads it."""
        fields = {
            "takes": _rows(self.takes),
            "operations": _rows(self.operations),
            "network": self.network,
            "rlimits": self.rlimits,
            "lifetime": self.lifetime,
            "memory": self.memory,
            "disk": self.disk,
            "expects_commands": self.expects_commands,
        }
        return pack_operations(self.preparations) + b"\n" + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    @lru_cache(maxsize=8)
    def from_json(cls, data: bytes) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the data is not a plan.
        """
        preparations, _, fields = data.partition(b"\n")
        try:
            raw = json.loads(fields)
            takes = cast("tuple[Take | Given | DiskUpper, ...]", tuple(_operation(*row) for row in raw["takes"]))
            operations = tuple(_operation(*row) for row in raw["operations"])
            rlimits = tuple((str(name), int(value)) for name, value in raw["rlimits"])
            lifetime, memory, disk = (int(raw[name]) for name in ("lifetime", "memory", "disk"))
            network, expects = str(raw["network"]), bool(raw["expects_commands"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        first = unpack_operations(preparations)
        return cls(first, takes, operations, network, rlimits, lifetime, memory, expects_commands=expects, disk=disk)


def pack_operations(operations: Sequence[Operation]) -> bytes:
    """Serialise operations as one line of JSON."""
    return json.dumps(_rows(operations), separators=(",", ":")).encode()


@lru_cache(maxsize=8)
def unpack_operations(line: bytes) -> tuple[Operation, ...]:
    """Read what :func:`pack_operations` wrote.

    Raises:
        ValueError: the line holds no operations.
    """
    try:
        return tuple(_operation(*row) for row in json.loads(line))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not operations: {error!r}") from error


def _rows(operations: Sequence[Operation]) -> list[list[object]]:
    return [[type(op).__name__, *(getattr(op, f.name) for f in fields(op))] for op in operations]


def _operation(kind: str, *arguments: object) -> Operation:
    make: Callable[..., Operation] = _KINDS[kind]
    return make(*(tuple(value) if isinstance(value, list) else value for value in arguments))
