"""From what a caller asks for to the plan that the launcher executes; pure but for looking at directories."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.launch import plan as p
from minisandbox.types import ImageSpec, Limits, Mount, Network

USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOSTS = "127.0.0.1\tlocalhost {name}\n::1\tlocalhost ip6-localhost ip6-loopback\n"


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides what one sandbox looks like.

    Attributes:
        image: what is inside.
        limits: what it may use.
        network: what it can reach.
        mounts: host directories and files shown inside.
        hostname: what it is called inside.
        upper: host directory that takes the writes, or None for memory.
        writable_usr: whether the host's ``/usr`` can be idmapped and so be shown copy-on-write.
    """

    image: ImageSpec
    limits: Limits
    network: Network
    mounts: tuple[Mount, ...]
    hostname: str
    upper: Path | None
    writable_usr: bool


def make_plan(request: Request) -> p.Plan:
    """Lay out the operations that make a sandbox.

    Raises:
        InvalidValue: a mount or layer path is not usable.
    """
    image = request.image
    if not image.layers:
        raise InvalidValue(f"image {image.name!r} has no layers", hint="images.host_image() is the smallest image")
    operations = (
        *_takes(request),
        p.Scratch(request.limits.disk),
        *(p.Directory(path, mode) for path, mode in (("tmp", 0o1777), ("shm", 0o1777), ("run", 0o755), ("dev", 0o755))),
        *_name_service(request),
        *(p.Attach(f"layers/{slot}", slot=str(slot)) for slot in range(len(image.layers))),
        *_root(request),
        *(_usr(request) if image.host_usr else ()),
        p.Attach("root/dev", source="dev"),
        p.Devices("root/dev"),
        p.Attach("root/dev/shm", source="shm"),
        p.Attach("root/tmp", source="tmp"),
        p.Attach("root/run", source="run"),
        p.Proc("root/proc"),
        *_mounts(request.mounts),
        p.Enter(p.ROOT),
    )
    return p.Plan(operations, request.hostname, request.network.mode, tuple(_rlimits(request.limits)))


def check_mounts(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Refuse mounts that cannot be made as asked.

    Raises:
        InvalidValue: a path is relative, has ``..`` in it, does not exist, or a writable mount is asked for.
    """
    for mount in mounts:
        if not mount.read_only:
            raise InvalidValue(f"mount {mount.target}: writable mounts are not supported", hint="use files.upload")
        if not mount.target.is_absolute() or ".." in mount.target.parts or len(mount.target.parts) < 2:
            raise InvalidValue(f"mount target {mount.target} is not an absolute path below /")
        if not mount.source.is_absolute() or not (mount.source.is_dir() or mount.source.is_file()):
            raise InvalidValue(f"mount source {mount.source} is not an absolute path of a directory or file")
    return tuple(mounts)


def _takes(request: Request) -> Iterator[p.Take]:
    for slot, layer in enumerate(request.image.layers):
        yield p.Take(str(layer), str(slot))
    if request.image.host_usr:
        owners = "image" if request.writable_usr else "host"
        yield p.Take("/usr", "usr", owners=owners, recursive=not request.writable_usr)
        for name in _real_directories():
            yield p.Take(f"/{name}", name, owners="host", recursive=True)
    if request.upper is not None:
        yield p.Take(str(request.upper), "disk", read_only=False)
    for number, mount in enumerate(request.mounts):
        source = mount.source.resolve()
        yield p.Take(str(source if source.is_dir() else source.parent), f"m{number}")


def _mounts(mounts: tuple[Mount, ...]) -> Iterator[p.Operation]:
    """Show each mount through an overlay: the mount table has the path of a bind's source, but not of a lower."""
    if mounts:
        yield p.Directory("mounts")
        yield p.Directory("mounts/empty")
    for number, mount in enumerate(mounts):
        lower, merged = f"mounts/lower-{number}", f"mounts/{number}"
        yield p.Attach(lower, slot=f"m{number}")
        yield p.Overlay(merged, (lower, "mounts/empty"), "", "")
        source = mount.source.resolve()
        yield p.Attach(f"root{mount.target}", source=merged if source.is_dir() else f"{merged}/{source.name}")


def _real_directories() -> list[str]:
    """Top-level directories that most hosts link into /usr and this one does not."""
    return [name for name in USR_LINKS if Path("/", name).is_dir() and not Path("/", name).is_symlink()]


def _root(request: Request) -> Iterator[p.Operation]:
    lowers = tuple(f"layers/{slot}" for slot in reversed(range(len(request.image.layers))))
    if request.upper is not None:
        yield p.Attach("disk", slot="disk")
        yield p.Overlay(p.ROOT, lowers, "disk/tree", "disk/work", volatile=True)
        return
    yield p.Directory("upper")
    yield p.Directory("work")
    yield p.Overlay(p.ROOT, lowers, "upper", "work")


def _usr(request: Request) -> Iterator[p.Operation]:
    for name in _real_directories():
        yield p.Attach(f"root/{name}", slot=name)
    if not request.writable_usr:
        yield p.Attach("root/usr", slot="usr")
        return
    yield p.Attach("layers/usr", slot="usr")
    changed = (f"layers/{slot}/usr" for slot, layer in reversed([*enumerate(request.image.layers)]) if _has_usr(layer))
    lowers = (*changed, "layers/usr")
    if request.upper is not None:
        yield p.Overlay("root/usr", lowers, "disk/usr", "disk/usr-work", volatile=True)
        return
    yield p.Directory("usr")
    yield p.Directory("usr-work")
    yield p.Overlay("root/usr", lowers, "usr", "usr-work")


def _has_usr(layer: Path) -> bool:
    """Whether a layer changes something below /usr (the base layer's empty mount point does not count)."""
    usr = layer / "usr"
    try:
        return stat.S_ISDIR(usr.lstat().st_mode) and any(usr.iterdir())
    except FileNotFoundError:
        return False


def _name_service(request: Request) -> Iterator[p.File]:
    resolver = Path("/etc/resolv.conf")
    outside = request.network.mode == "host"
    text = resolver.read_text(encoding="utf-8", errors="replace") if outside and resolver.is_file() else ""
    yield p.File("run/resolv.conf", text)
    yield p.File("run/hosts", _HOSTS.format(name=request.hostname))


def _rlimits(limits: Limits) -> Iterator[tuple[str, int]]:
    yield "CORE", 0
    yield "NPROC", limits.processes
    yield "NOFILE", limits.open_files
    if limits.file_size is not None:
        yield "FSIZE", limits.file_size
