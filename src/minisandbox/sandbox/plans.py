"""Turn a request for a sandbox into the plan that the launcher executes; reads directories, changes nothing."""

from __future__ import annotations

import functools
import os
import resource
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisandbox.errors import HostError, InvalidValue
from minisandbox.host.file_systems import USR_LINKS
from minisandbox.launch import plan as p
from minisandbox.types import ImageSpec, Limits, Mount, Network

LEAST_DISK = 64 << 10
"""Minimum bytes of scratch that must remain on top of sealed trees."""
HOSTNAME = "sandbox"
"""Hostname inside every sandbox."""
_USUAL_DISK = Limits().disk
_VIEWER_SCRATCH = 1 << 20
_OWN_PROCESSES = 8
"""Processes added to the limit for pid 1 and the workers, which the kernel counts too."""
# Files of /proc that describe the host and not the sandbox. Docker masks those in the first lines (moby/profiles), and
# programs in a sandbox need none of the others.
_HIDDEN = (
    "acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list",
    "timer_stats", "cmdline", "config.gz", "dynamic_debug", "iomem", "ioports", "kallsyms", "key-users", "kmsg",
    "kpagecgroup", "kpagecount", "kpageflags", "modules", "pagetypeinfo", "slabinfo", "sysrq-trigger", "vmallocinfo",
    "pressure", "locks", "swaps", "bootconfig",
)  # fmt: skip
# Files of /proc that programs read. A name in neither list, as from another kernel or a driver, is hidden.
_SHOWN = frozenset(
    {
        "buddyinfo", "bus", "cgroups", "consoles", "cpuinfo", "crypto", "devices", "diskstats", "dma", "driver",
        "execdomains", "filesystems", "fs", "irq", "loadavg", "meminfo", "misc", "mounts", "mtrr", "net", "partitions",
        "self", "softirqs", "stat", "sys", "sysvipc", "thread-self", "tty", "uptime", "version", "vmstat", "zoneinfo",
    }
)  # fmt: skip
_FROZEN = ("bus", "driver", "fs", "irq", "sys", "tty")
_OTHERS_PROCESSES = 192
"""Processes of an ordinary user's limit that one sandbox leaves to the user and the user's other sandboxes."""
_HOSTS = "127.0.0.1\tlocalhost {name}\n::1\tlocalhost ip6-localhost ip6-loopback\n"


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """Everything that determines the plan of one sandbox.

    Attributes:
        image: its image.
        limits: its resource limits.
        network: its network access.
        mounts: host directories and files to mount inside.
        hostname: its hostname.
        upper: host directory used as the upper, or None for an upper in memory.
        writable_usr: whether the host's ``/usr`` can be idmapped, so that it can be mounted copy-on-write.
        layered_usr: whether the host's ``/usr`` can be an overlay layer.
        host_sockets: paths to cover below bind-mounted host directories (:func:`find_host_sockets`).
        sealed: number of sealed trees on top of the image.
        sealed_size: bytes of ``limits.disk`` that the sealed trees take.
        disk_upper: whether the upper is a directory on the store's disk, because this kernel does not support one in
            memory (:class:`.uppers.UpperDirectory`).
        enforcement: mechanisms that enforce the machine-dependent limits (:func:`.launcher.enforcement`).
        pretend_owners: whether changes of file owners and ids do nothing but return success, for builds with one id.
        keep_tmp: whether a build's /tmp is part of its layer.
        tmpfs: in-memory file systems, with paths inside the sandbox.
    """

    image: ImageSpec
    limits: Limits
    network: Network
    mounts: tuple[Mount, ...]
    hostname: str
    upper: Path | None
    writable_usr: bool
    layered_usr: bool = True
    host_sockets: tuple[str, ...] = ()
    sealed: int = 0
    sealed_size: int = 0
    disk_upper: bool = False
    enforcement: Mapping[str, str] = field(default_factory=dict)
    pretend_owners: bool = False
    keep_tmp: bool = False
    tmpfs: tuple[p.Tmpfs, ...] = ()

    @property
    def given_uppers(self) -> tuple[Path, ...]:
        """The host directories that a build writes to: the uppers of the root and of mounts."""
        return tuple(filter(None, (self.upper, *(mount.upper for mount in self.mounts))))

    @property
    def one_id(self) -> bool:
        """Whether the sandbox has a single id, because the files of a build on disk must belong to an ordinary user."""
        return bool(self.given_uppers) and os.geteuid() != 0

    @property
    def upper_kind(self) -> str:
        """Kind of the upper, as in :attr:`.types.SandboxInfo.upper`."""
        if self.upper is not None:
            return "given"
        return "disk" if self.disk_upper else "memory"


def make_plan(request: SandboxRequest) -> p.Plan:
    """Build the plan of a sandbox.

    Raises:
        InvalidValue: a mount or layer path is not usable.
    """
    image = request.image
    if not image.layers:
        raise InvalidValue(f"image {image.name!r} has no layers", hint="images.host_image() is the smallest image")
    operations = (
        *_resize(_remaining_disk(request)),
        *((p.Attach("disk", slot="disk"),) if request.disk_upper else ()),
        *(p.Attach(f"layers/{slot}", slot=str(slot)) for slot in range(len(image.layers))),
        *(p.Attach(f"sealed/{slot}", slot=f"s{slot}") for slot in range(request.sealed)),
        *_root(request),
        *(_usr(request) if image.host_usr else ()),
        *_tmp(request),
        *(p.Move(f"root/{name}", source=name) for name in ("dev", "run", "proc")),
        *(replace(tmpfs, path=f"{p.ROOT}/{tmpfs.path}") for tmpfs in request.tmpfs),
        *_mounts(request.mounts),
        *_missing(request),
        p.Enter(p.ROOT),
    )
    limits, enforcement = request.limits, request.enforcement
    lifetime = 0 if limits.lifetime is None else max(1, int(limits.lifetime * 1000))
    watched_memory = limits.memory if limits.memory is not None and not _grouped(enforcement, "memory") else 0
    return p.Plan(
        _preparations(request.hostname, host_network=request.network.mode == "host"), tuple(_takes(request)),
        operations,
        request.network.mode, tuple(_rlimits(request)), lifetime, watched_memory, limits.inotify,
        limits.processes + _OWN_PROCESSES, tuple(_group_limits(limits, enforcement)),
        disk=_remaining_disk(request) if request.disk_upper else 0,
        one_id=request.one_id, pretend_owners=request.pretend_owners,
    )  # fmt: skip


_plan_cache: dict[object, p.Plan] = {}
_MOST_CACHED = 100


def find_plan(request: SandboxRequest) -> p.Plan:
    """Return the plan of :func:`make_plan`, cached for equal requests.

    Raises:
        InvalidValue: a mount or layer path is not usable.
    """
    if request.mounts or request.network.mode == "host":  # both depend on files of the host
        return make_plan(request)
    fields = (getattr(request, name) for name in SandboxRequest.__slots__)
    hashable_fields = (tuple(value.items()) if isinstance(value, Mapping) else value for value in fields)
    key = (*hashable_fields, *_usr_layers(request.image), resource.getrlimit(resource.RLIMIT_NPROC))
    plan = _plan_cache.get(key)
    if plan is None:
        if len(_plan_cache) >= _MOST_CACHED:
            _plan_cache.clear()
        plan = _plan_cache[key] = make_plan(request)
    return plan


@functools.cache
def usual_preparations() -> bytes:
    """Return the preparations of every spare, encoded as the first line of a plan."""
    return p.pack_operations(_preparations(HOSTNAME, host_network=False))


def _preparations(hostname: str, *, host_network: bool) -> tuple[p.Operation, ...]:
    """Return the operations that do not depend on the image.

    Args:
        hostname: hostname inside.
        host_network: whether the sandbox uses the host's network.
    """
    return (
        p.Scratch(_USUAL_DISK),
        *(p.Directory(path) for path in (p.ROOT, "layers", "run", "dev")),
        p.Directory("shm", 0o1777),
        p.Directory("run/lock", 0o1777),  # Debian's /var/lock links to it
        *_name_service(hostname, host_network=host_network),
        p.Name(hostname),
        p.Attach("dev", source="dev"),
        p.Devices("dev"),
        p.Attach("dev/shm", source="shm"),
        p.Attach("run", source="run"),
        p.Proc("proc", (*_HIDDEN, *_unknown()), _FROZEN),
    )


def _resize(size: int) -> Iterator[p.Resize]:
    if size != _USUAL_DISK:
        yield p.Resize(size)


@functools.cache
def _unknown() -> tuple[str, ...]:
    """Return the names in the host's /proc that are in neither list, because they may describe the host."""
    names = (name for name in os.listdir("/proc") if not name.isdigit())
    return tuple(sorted(set(names).difference(_HIDDEN, _SHOWN)))


def _remaining_disk(request: SandboxRequest) -> int:
    """Return the remaining bytes of the disk limit. Sealed trees count in full, with deleted and overwritten files."""
    disk = request.limits.disk
    return max(disk - request.sealed_size, min(disk, LEAST_DISK))


def make_viewer_plan(request: SandboxRequest, tree_count: int) -> p.Plan:
    """Build the plan of a sandbox that only reads the uppers and the image of a workspace (:mod:`.comparing`).

    Args:
        request: request of the workspace.
        tree_count: number of its uppers, sealed or not.
    """
    image, has_usr = request.image, request.image.host_usr and request.writable_usr
    viewer_request = replace(request, sealed=tree_count, mounts=(), upper=None, disk_upper=False)
    operations: list[p.Operation] = [
        *_resize(_VIEWER_SCRATCH),
        p.Directory("empty"),
        p.Attach(p.ROOT, source=p.ROOT),  # pivot_root(2) requires that the new root is a mount
        *(p.Attach(f"layers/{slot}", slot=str(slot)) for slot in range(len(image.layers))),
        *(p.Attach(f"root/trees/{tree_count - 1 - slot}", slot=f"s{slot}") for slot in range(tree_count)),
        p.Overlay("root/base", (*_layers(image), "empty"), "", ""),
    ]
    if has_usr:
        lowers = tuple(f"layers/{slot}/usr" for slot in _usr_layers(image))
        operations.append(p.Attach("layers/usr", slot="usr"))
        operations.append(p.Overlay("root/base-usr", (*lowers, "layers/usr", "empty"), "", ""))
    operations += (p.Move("root/proc", source="proc"), p.Enter(p.ROOT))
    preparations = _preparations(request.hostname, host_network=False)
    return p.Plan(
        preparations, tuple(_takes(viewer_request)), tuple(operations), rlimits=(("CORE", 0), ("NOFILE", 4096))
    )


def check_mounts(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Check that the mounts are supported and their paths are valid.

    Raises:
        InvalidValue: a path is relative, contains ``..`` or does not exist, or a mount is writable.
    """
    for mount in mounts:
        if not mount.read_only:
            raise InvalidValue(f"mount {mount.target}: writable mounts are not supported", hint="use files.upload")
        if not mount.target.is_absolute() or ".." in mount.target.parts or len(mount.target.parts) < 2:
            raise InvalidValue(f"mount target {mount.target} is not an absolute path below /")
        if not mount.source.is_absolute() or not (mount.source.is_dir() or mount.source.is_file()):
            raise InvalidValue(f"mount source {mount.source} is not an absolute path of a directory or file")
        for path in (mount.source, *mount.below) if mount.below or mount.upper else ():
            if not path.is_absolute() or not path.is_dir():
                raise InvalidValue(
                    f"{path}, of mount {mount.target} with below= or upper=, is not a directory's absolute path"
                )
    return tuple(mounts)


def _takes(request: SandboxRequest) -> Iterator[p.Take | p.Given | p.DiskUpper]:
    for slot, layer in enumerate(request.image.layers):
        yield p.Take(str(layer), str(slot))
    for number in range(request.sealed):
        yield p.Given(number, f"s{number}")
    if request.image.host_usr:
        owners = "image" if request.writable_usr else "host"
        yield p.Take("/usr", "usr", owners=owners, recursive=not request.layered_usr)
        for name in real_directories():
            yield p.Take(f"/{name}", name, owners="host", recursive=True)
    if request.upper is not None:
        yield p.Take(str(request.upper), "disk", read_only=False)
    if request.disk_upper:
        yield p.DiskUpper("", "disk")
    for number, mount in enumerate(request.mounts):
        yield from (p.Take(str(path), slot) for slot, path in _sources(number, mount))
        if mount.upper is not None:
            yield p.Take(str(mount.upper), f"m{number}.upper", read_only=False)


def _sources(number: int, mount: Mount) -> Iterator[tuple[str, Path]]:
    """Yield the (slot, directory) pairs of a mount, topmost directory first."""
    source = mount.source.resolve()
    for depth, path in enumerate((source if source.is_dir() else source.parent, *reversed(mount.below))):
        yield f"m{number}.{depth}", path.resolve()


def _mounts(mounts: tuple[Mount, ...]) -> Iterator[p.Operation]:
    """Mount each source through an overlay, because the mount table would show the host path of a bind mount."""
    if mounts:
        yield p.Directory("mounts")
        yield p.Directory("mounts/empty")
    for number, mount in enumerate(mounts):
        merged = f"mounts/{number}"
        slots = [slot for slot, _ in _sources(number, mount)]
        yield from (p.Attach(f"mounts/lower-{slot}", slot=slot) for slot in slots)
        lowers = (*(f"mounts/lower-{slot}" for slot in slots), "mounts/empty")
        if mount.upper is None:
            yield p.Overlay(merged, lowers, "", "")
        else:
            upper = f"mounts/upper-{number}"
            yield p.Attach(upper, slot=f"m{number}.upper")
            yield p.Overlay(merged, lowers, f"{upper}/tree", f"{upper}/work", volatile=True)
        source = mount.source.resolve()
        yield p.Attach(f"root{mount.target}", source=merged if source.is_dir() else f"{merged}/{source.name}")


def find_host_sockets(directories: Iterable[str]) -> tuple[str, ...]:
    """Return the sockets and FIFOs below host directories, and the directories that this user cannot list.

    Even a read-only bind mount shows the host's inodes, so code inside could connect to their listeners. An overlay
    creates its own inodes, which have no listener. The search takes almost a second for ten thousand directories.

    Args:
        directories: absolute paths of directories; symbolic links are not followed.

    Returns:
        Paths without the leading slash.
    """
    paths: list[str] = []
    pending = list(directories)
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif not (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                        paths.append(entry.path.lstrip("/"))
        except OSError:
            paths.append(directory.lstrip("/"))
    return tuple(paths)


@functools.cache
def real_directories() -> tuple[str, ...]:
    """Return the top-level directories that most hosts, but not this one, link into /usr."""
    return tuple(name for name in USR_LINKS if Path("/", name).is_dir() and not Path("/", name).is_symlink())


def _root(request: SandboxRequest) -> Iterator[p.Operation]:
    lowers = (*_sealed(request, "upper"), *_layers(request.image))
    if request.upper is not None:
        yield p.Attach("disk", slot="disk")
        yield p.Overlay(p.ROOT, lowers, "disk/tree", "disk/work", volatile=True)
        return
    yield from _writable(request, p.ROOT, lowers, "upper", "work")


def _writable(
    request: SandboxRequest, path: str, lowers: tuple[str, ...], upper: str, work: str
) -> Iterator[p.Operation]:
    """Mount a writable overlay with its upper in scratch or on disk."""
    prefix = "disk/" if request.disk_upper else ""
    yield p.Directory(f"{prefix}{upper}")
    yield p.Directory(f"{prefix}{work}")
    yield p.Overlay(path, lowers, f"{prefix}{upper}", f"{prefix}{work}", volatile=request.disk_upper)


def with_disk_upper(plan: p.Plan, upper: Path) -> p.Plan:
    """Return the plan with this directory as its disk upper; forks share the rest of the plan."""
    takes = (p.DiskUpper(str(upper), take.slot) if isinstance(take, p.DiskUpper) else take for take in plan.takes)
    return replace(plan, takes=tuple(takes))


def _sealed(request: SandboxRequest, subdirectory: str) -> tuple[str, ...]:
    """Return the scratch paths of one part of the sealed trees, topmost first."""
    return tuple(f"sealed/{number}/{subdirectory}" for number in reversed(range(request.sealed)))


def _layers(image: ImageSpec) -> tuple[str, ...]:
    """Return the scratch paths of the layers, topmost first."""
    return tuple(f"layers/{slot}" for slot in reversed(range(len(image.layers))))


def _missing(request: SandboxRequest) -> Iterator[p.Complete]:
    """Create the directories that the image names, except on top of sealed trees, which may have removed them."""
    directories = (request.image.workdir, *request.image.volumes)
    if not request.sealed and (paths := tuple(str(path) for path in directories if path.name)):
        yield p.Complete(p.ROOT, paths)


def _tmp(request: SandboxRequest) -> Iterator[p.Operation]:
    """Mount a separate /tmp in builds that do not keep it; a workspace's /tmp is part of its snapshots."""
    if request.upper is not None and not request.keep_tmp:
        yield p.Directory("tmp", 0o1777)
        yield p.Attach("root/tmp", source="tmp")


def _usr(request: SandboxRequest) -> Iterator[p.Operation]:
    for name in real_directories():
        yield p.Attach(f"root/{name}", slot=name)
    if not request.layered_usr:
        yield p.Attach("root/usr", slot="usr")
    if request.host_sockets:
        yield p.Cover(tuple(f"root/{path}" for path in request.host_sockets))
    if not request.layered_usr:
        return
    yield p.Attach("layers/usr", slot="usr")
    if not request.writable_usr:  # use an overlay, so that file locks and inotify do not affect the host's inodes
        yield p.Directory("no-usr")
        yield p.Overlay("root/usr", ("layers/usr", "no-usr"), "", "")
        return
    changed_usr = (f"layers/{slot}/usr" for slot in _usr_layers(request.image))
    lowers = (*_sealed(request, "usr"), *changed_usr, "layers/usr")
    if request.upper is not None:
        yield p.Overlay("root/usr", lowers, "disk/usr", "disk/usr-work", volatile=True)
        return
    yield from _writable(request, "root/usr", lowers, "usr", "usr-work")


def _usr_layers(image: ImageSpec) -> list[int]:
    """Return the indices of the layers that change /usr, topmost first."""
    return [slot for slot, layer in reversed([*enumerate(image.layers)]) if _has_usr(layer)]


def _has_usr(layer: Path) -> bool:
    """Return whether a layer changes /usr; the base layer's empty mount point does not count."""
    usr = os.path.join(layer, "usr")
    try:
        status = os.lstat(usr)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and _has_entries(usr, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(1024)
def _has_entries(directory: str, inode: int, mtime_ns: int) -> bool:  # noqa: ARG001 - part of the cache key
    with os.scandir(directory) as entries:
        return any(True for _ in entries)


def _name_service(hostname: str, *, host_network: bool) -> Iterator[p.File]:
    resolver = Path("/etc/resolv.conf")
    text = resolver.read_text(encoding="utf-8", errors="replace") if host_network and resolver.is_file() else ""
    yield p.File("run/resolv.conf", text)
    yield p.File("run/hosts", _HOSTS.format(name=hostname))


def _grouped(enforcement: Mapping[str, str], name: str) -> bool:
    return enforcement.get(name, "").startswith("cgroup")


def _group_limits(limits: Limits, enforcement: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    if limits.memory is not None and _grouped(enforcement, "memory"):
        yield "memory", limits.memory
    if _grouped(enforcement, "processes"):
        yield "processes", limits.processes + _OWN_PROCESSES
    if limits.cpu is not None:
        if not _grouped(enforcement, "cpu"):
            raise HostError(
                f"Limits.cpu={limits.cpu:g} cannot be enforced on this machine",
                reason="there is no control group with a cpu controller that this process may use",
                hint="run 'minisandbox doctor' for the line that allows it, or leave the limit out",
            )
        yield "cpu", max(1, round(limits.cpu * 1000))


def _rlimits(request: SandboxRequest) -> Iterator[tuple[str, int]]:
    limits = request.limits
    yield "CORE", 0
    _, maximum = resource.getrlimit(resource.RLIMIT_NPROC)  # an ordinary user's sandboxes share this limit
    processes = limits.processes if maximum < 0 else min(limits.processes, max(maximum - _OTHERS_PROCESSES, 1))
    if processes < limits.processes or not _grouped(request.enforcement, "processes"):
        yield "NPROC", processes
    if limits.memory is not None and not _grouped(request.enforcement, "memory"):
        yield "DATA", limits.memory  # bounds what one process can allocate between two checks of the watchdog
    yield "NOFILE", limits.open_files
    if limits.file_size is not None:
        yield "FSIZE", limits.file_size
