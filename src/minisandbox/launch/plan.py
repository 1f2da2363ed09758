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
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import ClassVar

from .kernel.identity import INOTIFY, PROCESSES

ROOT = "root"
"""Scratch path of the sandbox's future root directory."""


class _Operation:
    """An operation of a plan. ``summary`` is the format string of its description."""

    __slots__ = ()
    summary: ClassVar[str]

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return self.summary.format(self)


@dataclass(frozen=True, slots=True)
class Take(_Operation):
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
class Given(_Operation):
    """Hold a sealed upper of another sandbox, which the zygote passes along with the plan.

    Attributes:
        number: index among the trees passed.
        slot: slot of the tree.
    """

    number: int
    slot: str
    summary = "take sealed tree {0.number} as {0.slot} (ro, owners: image)"


@dataclass(frozen=True, slots=True)
class Scratch(_Operation):
    """Mount the scratch tmpfs and make it the working directory.

    Attributes:
        size: bytes it may hold.
    """

    size: int
    summary = "make a scratch tmpfs of {0.size} bytes"


@dataclass(frozen=True, slots=True)
class Resize(_Operation):
    """Resize the scratch tmpfs.

    Attributes:
        size: bytes it may hold.
    """

    size: int
    summary = "limit the scratch tmpfs to {0.size} bytes"


@dataclass(frozen=True, slots=True)
class DiskUpper(_Operation):
    """Hold a directory on the store's disk as the overlay's upper; like scratch, it can outlive the sandbox.

    Attributes:
        source: absolute host path of an empty directory.
        slot: slot of the directory.
    """

    source: str
    slot: str
    summary = "take {0.source} as {0.slot} (rw, for what is written)"


@dataclass(frozen=True, slots=True)
class Directory(_Operation):
    """Make a directory in scratch, owned by the sandbox's uid 0."""

    path: str
    mode: int = 0o755
    summary = "make directory {0.path} ({0.mode:04o})"


@dataclass(frozen=True, slots=True)
class Attach(_Operation):
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
class Move(_Operation):
    """Move a mount and all mounts below it; the rules for ``path`` are those of :class:`Attach`.

    Attributes:
        path: scratch path of the new mount point.
        source: scratch path of the mount.
    """

    path: str
    source: str
    summary = "move {0.source} to {0.path}"


@dataclass(frozen=True, slots=True)
class Overlay(_Operation):
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
class Tmpfs(_Operation):
    """Mount a tmpfs that every user inside may write to.

    Attributes:
        path: scratch path to mount it at.
        size: bytes it may hold; 0: the kernel's default.
        shown: paths below ``path`` whose current content is mounted into the tmpfs.
    """

    path: str
    size: int = 0
    shown: tuple[str, ...] = ()
    summary = "mount a tmpfs at {0.path}"


@dataclass(frozen=True, slots=True)
class Devices(_Operation):
    """Create the standard device files in a scratch directory, and mount a devpts of the sandbox's own."""

    path: str
    summary = "make devices in {0.path}"


@dataclass(frozen=True, slots=True)
class Proc(_Operation):
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
class Cover(_Operation):
    """Cover forbidden paths with an empty read-only file or directory; skip paths that no longer exist."""

    paths: tuple[str, ...]

    def describe(self) -> str:
        """Return a one-line description of the operation."""
        return f"cover {len(self.paths)} sockets, FIFOs and closed directories"


@dataclass(frozen=True, slots=True)
class File(_Operation):
    """Write a small file in scratch, owned by the sandbox's uid 0."""

    path: str
    text: str
    mode: int = 0o644
    summary = "write {0.path}"


@dataclass(frozen=True, slots=True)
class Name(_Operation):
    """Set the hostname; if the kernel refuses, make the current hostname resolve through ``run/hosts``."""

    hostname: str
    summary = "call it {0.hostname}"


@dataclass(frozen=True, slots=True)
class Complete(_Operation):
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
class Enter(_Operation):
    """Make a scratch directory the root directory, and detach the host's root (pivot_root(2))."""

    path: str
    summary = "make {0.path} the root directory"


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


_SENT_FIELDS = ("network", "rlimits", "lifetime", "memory", "disk", "expects_commands")
"""Fields of a plan that setup workers need, besides its operations."""


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
        one_id: whether the sandbox has a single uid, unless it has an id range that no other sandbox shares.
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
        fields = {name: getattr(self, name) for name in _SENT_FIELDS}
        fields |= {"takes": _rows(self.takes), "operations": _rows(self.operations)}
        return pack_operations(self.preparations) + b"\n" + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    @lru_cache(maxsize=8)
    def from_json(cls, data: bytes) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the data is not a plan.
        """
        preparations, _, text = data.partition(b"\n")
        try:
            fields = json.loads(text)
            for name in ("takes", "operations"):
                fields[name] = tuple(_operation(*row) for row in fields[name])
            fields["rlimits"] = tuple((name, value) for name, value in fields["rlimits"])
            return cls(unpack_operations(preparations), **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """Options of a ``create`` request that the zygote itself needs; the plan contains all others.

    Attributes:
        network: ``off`` or ``host``.
        one_id: whether the sandbox has a single uid, for builds by an ordinary user, who then owns all their files.
        inotify: limit of inotify instances.
        nproc: limit of processes for all ids of the sandbox together; 0: no limit.
        sealed: numbers of the sealed trees that are lower layers of the sandbox.
        amounts: (name, amount) of the limits of its control group.
        pretend_owners: whether changes of file owners and ids do nothing but return success.
    """

    network: str = "off"
    one_id: bool = False
    inotify: int = INOTIFY
    nproc: int = 0
    sealed: Sequence[int] = ()
    amounts: Sequence[tuple[str, int]] = ()
    pretend_owners: bool = False

    def to_json(self) -> bytes:
        """Serialise the options without whitespace; :meth:`from_json` reads them."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: str) -> SpawnOptions:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the data is not JSON.
        """
        return cls(**json.loads(data))

    def fits(self, spare: SpawnOptions, *, many_ids: bool) -> bool:
        """Return whether a spare that was forked with the options ``spare`` suits this request."""
        ids_fit = (self.one_id, self.nproc) == (spare.one_id, spare.nproc) or not many_ids
        settings_fit = (self.network, self.inotify, self.limits_cpu) == (spare.network, spare.inotify, spare.limits_cpu)
        return settings_fit and ids_fit and self.pretend_owners == spare.pretend_owners

    @property
    def limits_cpu(self) -> bool:
        """Whether the control group limits the CPU."""
        return any(name == "cpu" for name, _ in self.amounts)


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
    return [
        [type(operation).__name__, *(getattr(operation, field.name) for field in fields(operation))]
        for operation in operations
    ]


def _operation(kind: str, *arguments: object) -> Operation:
    make: Callable[..., Operation] = _KINDS[kind]
    return make(*(tuple(value) if isinstance(value, list) else value for value in arguments))
