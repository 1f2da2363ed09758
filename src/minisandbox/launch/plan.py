"""A sandbox's filesystem described as frozen operations; pure data, nothing here touches the kernel.

A plan is made by the controller, travels to the zygote as JSON, and is executed by :mod:`.kernel.mounts`, in three
parts: its *preparations*, which are the same for almost every plan and carried out before anybody asks; its *takes*,
where host paths are what they seem; and the *operations* that need both. Its names:

* *slot*: a short neutral name ("0", "1", "usr") under which a host tree is held. Host paths appear only in
  :class:`Take`; everything the mount table of the sandbox shows is made of slots.
* *scratch*: one tmpfs per sandbox that carries its mount points, its upper, ``/tmp``, ``/run``, ``/dev`` and
  ``/dev/shm``, so that one size is the quota for all writes. Paths in operations are relative to its root.
* *disk upper*: where a tmpfs cannot be an overlay's upper, a directory of the store's disk is bound in scratch and
  takes the writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import cast

INOTIFY = 32
"""Inotify instances of one sandbox by default; the kernel's default for all of a user is 128 (inotify(7))."""
PROCESSES = 1032
"""Processes of one sandbox by default, pid 1 and workers included."""

ROOT = "root"
"""Scratch path of the sandbox's future root directory."""
BYTES_PER_FILE = 4096
"""Scratch may hold a file for each so many bytes of it, and some more of the sandbox's own."""


@dataclass(frozen=True, slots=True)
class Take:
    """Hold a private copy of the mount at a host path under a slot.

    Attributes:
        source: absolute host path of a directory or file.
        slot: name to hold it under.
        owners: ``image``: files of the owner of the layers appear as uid 0 inside; ``host``: owners stay as they are.
        read_only: whether the copy refuses writes.
        recursive: whether mounts below come along.
        devices: whether device files in it work.
    """

    source: str
    slot: str
    owners: str = "image"
    read_only: bool = True
    recursive: bool = False
    devices: bool = False

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"take {self.source} as {self.slot} ({'ro' if self.read_only else 'rw'}, owners: {self.owners})"


@dataclass(frozen=True, slots=True)
class Given:
    """Hold a tree that the zygote hands over with the plan: what another sandbox wrote, now sealed.

    Attributes:
        number: which of the trees handed over.
        slot: name to hold it under.
    """

    number: int
    slot: str

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"take sealed tree {self.number} as {self.slot} (ro, owners: image)"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Make the scratch tmpfs and go into it.

    Attributes:
        size: bytes it may hold.
    """

    size: int

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"make a scratch tmpfs of {self.size} bytes"


@dataclass(frozen=True, slots=True)
class Resize:
    """Give the scratch tmpfs another size.

    Attributes:
        size: bytes it may hold.
    """

    size: int

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"limit the scratch tmpfs to {self.size} bytes"


@dataclass(frozen=True, slots=True)
class DiskUpper:
    """Hold a directory of the store's disk under a slot; it takes the writes, and outlives the sandbox like scratch.

    Attributes:
        source: absolute host path of an empty directory.
        slot: name to hold it under.
    """

    source: str
    slot: str

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"take {self.source} as {self.slot} (rw, for what is written)"


@dataclass(frozen=True, slots=True)
class Directory:
    """Make a directory in scratch, owned by the sandbox's uid 0."""

    path: str
    mode: int = 0o755

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"make directory {self.path} ({self.mode:04o})"


@dataclass(frozen=True, slots=True)
class Attach:
    """Attach a slot (or, with ``source``, a scratch directory) at a path; missing mount points are made.

    No component of ``path`` may be a symbolic link: image content must not redirect a mount.

    Attributes:
        path: scratch path to attach at.
        slot: the slot that is attached, or "".
        source: the scratch path that is bound, or "".
    """

    path: str
    slot: str = ""
    source: str = ""

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"attach {self.slot or self.source} at {self.path}"


@dataclass(frozen=True, slots=True)
class Move:
    """Move a mount, with all below it, from one scratch path to another; as :class:`Attach` otherwise.

    Attributes:
        path: scratch path to move it to.
        source: scratch path where it is.
    """

    path: str
    source: str

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"move {self.source} to {self.path}"


@dataclass(frozen=True, slots=True)
class Overlay:
    """Mount an overlay.

    Attributes:
        path: scratch path to mount it at.
        lowers: scratch paths of the lower directories, topmost first.
        upper: scratch path of the upper directory; "" for a read-only overlay, which needs two lowers.
        work: scratch path of the work directory, on the same file system as ``upper``.
        volatile: skip syncing to disk on behalf of the sandbox (for uppers that are thrown away after a crash).
    """

    path: str
    lowers: tuple[str, ...]
    upper: str
    work: str
    volatile: bool = False

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"mount an overlay of {len(self.lowers)} lower directories at {self.path}"


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """Mount a tmpfs that every user inside may write to.

    Attributes:
        path: scratch path to mount it at.
        size: bytes it may hold; 0: as the kernel has it.
        shown: paths below it whose present content is shown in it.
    """

    path: str
    size: int = 0
    shown: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"mount a tmpfs at {self.path}"


@dataclass(frozen=True, slots=True)
class Devices:
    """Fill a scratch directory with the devices every program expects, and a terminal multiplexer of its own."""

    path: str

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"make devices in {self.path}"


@dataclass(frozen=True, slots=True)
class Proc:
    """Mount a /proc of the sandbox's own process namespace.

    Attributes:
        path: scratch path to mount it at.
        hidden: names in it that show nothing; one that this kernel does not have is passed over.
        frozen: names in it that are read-only; likewise.
    """

    path: str
    hidden: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"mount proc at {self.path}, {len(self.hidden)} names hidden, {len(self.frozen)} read-only"


@dataclass(frozen=True, slots=True)
class Cover:
    """Lay an empty file or directory, read-only, over what may not be reached; what is no more there is passed over."""

    paths: tuple[str, ...]

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"cover {len(self.paths)} sockets, FIFOs and closed directories"


@dataclass(frozen=True, slots=True)
class File:
    """Write a small file in scratch, owned by the sandbox's uid 0."""

    path: str
    text: str
    mode: int = 0o644

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"write {self.path}"


@dataclass(frozen=True, slots=True)
class Name:
    """Name the sandbox; if that is refused, have the name that it has resolve in it (``run/hosts``)."""

    hostname: str

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"call it {self.hostname}"


@dataclass(frozen=True, slots=True)
class Complete:
    """Make directories that an image names but does not hold, as engines do when a container starts.

    A symbolic link leads where it leads inside the sandbox. A directory that cannot be made stays missing.

    Attributes:
        root: scratch path of the root directory.
        paths: absolute paths inside.
    """

    root: str
    paths: tuple[str, ...]

    def describe(self) -> str:
        """Describe the operation, for people."""
        return f"make {', '.join(self.paths)} where missing"


@dataclass(frozen=True, slots=True)
class Enter:
    """Make a scratch directory the root of everything and forget the host's."""

    path: str

    def describe(self) -> str:
        """Describe the operation, for people."""
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
    """Everything the launcher needs to make one sandbox.

    Attributes:
        preparations: what does not depend on the image, in order.
        takes: the trees of the host that it shows.
        operations: what is made of both, in order.
        network: ``off`` (a network namespace of its own, loopback up), ``allow`` (the same, with a socket handed out on
            which a proxy listens) or ``host``.
        rlimits: (name without ``RLIMIT_``, value) pairs that every command gets, soft and hard.
        lifetime: milliseconds after which it is stopped; 0: never.
        expects_commands: whether there will be one at once: pid 1 then has a worker ready for it.
        memory: bytes that pid 1 watches over, if no control group does; 0: none.
        disk: bytes that pid 1 watches over, if there is a disk upper; 0: none.
        inotify: inotify instances of its user namespace.
        processes: processes of all its ids together, if no control group counts them.
        group_limits: (name, amount) for its control group (:meth:`.kernel.cgroups.Cgroup.limit`).
        one_id: whether it has but one uid if it would share more with the caller's other sandboxes.
        pretend_owners: whether changes of owners in it answer success and do nothing.
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
        """Return the plan as numbered lines, for people and for error messages."""
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
    """Operations as one line."""
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
