"""Run a RUN: in a sandbox over the layers below, whose writes become the next layer."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue
from minisandbox.images.dockerfile.copying import find_home, find_owner
from minisandbox.images.dockerfile.evaluation import PIPES
from minisandbox.images.dockerfile.parsing import refuse
from minisandbox.images.dockerfile.trees import split
from minisandbox.images.oci.pull import keeps_owners
from minisandbox.images.python.index import Access, host_access
from minisandbox.images.runner import LEAST_READING, Place, build_limits, build_sandbox, failure, logged, write_log
from minisandbox.images.tree import LinkError, Parts, resolve
from minisandbox.index_settings import host_settings
from minisandbox.launch.plan import Tmpfs
from minisandbox.sandbox.protocol.environment import network_environment
from minisandbox.spec import ResolvedMount, RunCommand
from minisandbox.store import Made
from minisandbox.store.blobs.below import Below
from minisandbox.store.blobs.unpack import OPAQUE
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import ExecResult, ImageSpec
from minisandbox.types import Mount as HostMount

_APT = b'APT::Sandbox::User "root";\n'
"""With one id apt cannot become the user _apt."""
_APT_PLACE = PurePosixPath("/run/minisandbox-apt.conf")


def run_layer(run: RunCommand, place: Place, show: Callable[[ResolvedMount, Path], None]) -> Made:
    """Run a RUN.

    Args:
        run: it.
        place: where.
        show: writes the files of a bind into a new directory, at ``m``.

    Returns:
        Everything it wrote.

    Raises:
        BuildError: it failed or took too long; its log is kept.
        DockerfileError: a mount or a user cannot be had.
        DiskFull: the store's disk is full.
        SandboxCreationError: there could be no sandbox.
    """
    upper = place.staging / "upper"
    for path in (upper, upper / "tree"):
        path.mkdir(mode=0o755)
        path.chmod(0o755)
    placement = Placement(upper / "tree", _below(place))
    with _placed(run, place, show, placement):
        result = _execute(run, place, upper, placement)
    write_log(place.log, logged(f"line {run.line}: {run.text}", result))
    if not result.ok:
        raise failure(place, run.text, result)
    return Made(upper / "tree", patience=max(place.timeout, LEAST_READING))


def _below(place: Place) -> Below:
    return Below(tuple(reversed(place.layers)))


# --- mounts -----------------------------------------------------------------------------------------------------------


@contextmanager
def _placed(
    run: RunCommand, place: Place, show: Callable[[ResolvedMount, Path], None], placement: Placement
) -> Iterator[None]:
    """Have what a RUN mounts there while the body runs."""
    with ExitStack() as stack:
        stack.callback(placement.clean)
        for number, mount in enumerate(run.mounts):
            try:
                stack.enter_context(_place(place, show, placement, mount, place.staging / f"mount{number}"))
            except LinkError as error:
                refuse(run, f"--mount at {mount.wanted.target}: {error}")
        yield


@contextmanager
def _place(
    place: Place, show: Callable[[ResolvedMount, Path], None], placement: Placement, mount: ResolvedMount, work: Path
) -> Iterator[None]:
    wanted = mount.wanted
    if wanted.kind in ("secret", "tmpfs"):
        if wanted.target:
            placement.expect(placement.target(wanted.target))
        yield
        return
    path = placement.target(wanted.target)
    if wanted.kind == "cache":
        owners = "kept" if keeps_owners() else "one"
        mode = 0o755 if wanted.mode is None else wanted.mode
        with cache(
            place.session.store.root / "caches", wanted.identity, owners, place.staging, mode, wanted.owner
        ) as cached:
            placement.put(path, cached)
            yield
            if (left := placement.take(path)) is not None:
                left.rename(cached)
        return
    show(mount, work)
    placement.put(path, work / "m")
    yield


def _tmpfs(run: RunCommand, placement: Placement) -> Iterator[Tmpfs]:
    """The file systems in memory, outer ones first; what is placed below one is shown in it."""
    paths = [(placement.target(mount.wanted.target), mount.wanted) for mount in run.mounts if mount.wanted.target]
    for path, wanted in sorted(paths, key=lambda row: row[0]):
        if wanted.kind == "tmpfs":
            below = (there for there, other in paths if other.kind in ("cache", "bind") and there[: len(path)] == path)
            shown = tuple("/".join(there[len(path) :]) for there in below if there != path)
            yield Tmpfs("/".join(path), wanted.size, shown)


def _secrets(run: RunCommand, place: Place) -> Iterator[HostMount]:
    """The files of secrets: mounts, so that they can lie in /run, which each sandbox has of its own."""
    for number, mount in enumerate(run.mounts):
        wanted = mount.wanted
        if wanted.kind != "secret":
            continue
        content = dict(run.secrets).get(wanted.identity)
        if content is None and wanted.required:
            refuse(run, f"there is no secret {wanted.identity!r}", f"give it: --secret id={wanted.identity},src=FILE")
        if content is not None and wanted.target:
            path = place.staging / f"secret{number}"
            path.write_bytes(content)
            if keeps_owners():
                os.chown(path, *wanted.owner)
            path.chmod(0o400 if wanted.mode is None else wanted.mode)
            yield HostMount(path, PurePosixPath(wanted.target))


def _secret_variables(run: RunCommand) -> dict[str, str]:
    wanted = [mount.wanted for mount in run.mounts if mount.wanted.kind == "secret" and mount.wanted.variable]
    return {
        one.variable: dict(run.secrets)[one.identity].decode("utf-8", "surrogateescape")
        for one in wanted
        if one.identity in dict(run.secrets)
    }


# --- the command ------------------------------------------------------------------------------------------------------


def _execute(run: RunCommand, place: Place, upper: Path, placement: Placement) -> ExecResult:
    network = run.network
    outside = host_access(None, host_settings(), f"line {run.line}") if network.mode == "host" else Access(network, {})
    environment = {
        **network_environment(network), **outside.environment, **dict(run.unkeyed),
        "HOME": _home(run, place), **dict(run.variables),
    }  # fmt: skip
    user = _user(run, place)
    mounts = [*_script(run, place), *_secrets(run, place), *outside.mounts]
    if not keeps_owners():
        apt = place.staging / "apt.conf"
        apt.write_bytes(_APT)
        mounts.append(HostMount(apt, _APT_PLACE))
        environment.setdefault("APT_CONFIG", str(_APT_PLACE))
    name = f"{place.image}: line {run.line}"
    spec = ImageSpec(name, place.layers, workdir=PurePosixPath(run.workdir), host_usr=False)
    limits = build_limits(place.session.memory)
    box = build_sandbox(
        spec,
        limits,
        network,
        tuple(mounts),
        upper,
        environment=environment,
        pretend_owners=not keeps_owners(),
        keep_tmp=True,
        tmpfs=tuple(_tmpfs(run, placement)),
    )
    with box, place.session.cancellation.running(box):
        try:
            return box.exec(
                list(run.argv), cwd=run.workdir, timeout=place.timeout, env=_secret_variables(run), user=user
            )
        except InvalidValue as error:
            refuse(run, f"USER {run.user}: {error}", "make the user in a RUN before")


def _user(run: RunCommand, place: Place) -> str | None:
    """Return as whom the command runs, None for root; with one id that is everybody that the image has."""
    try:
        ids = find_owner(run.user, _below(place))
    except ValueError as error:
        refuse(run, f"USER {run.user}: {error}", "make the user in a RUN before")
    return run.user if keeps_owners() and ids != (0, 0) else None


def _home(run: RunCommand, place: Place) -> str:
    """The home directory of a RUN's user, with one id too, where it runs as root."""
    return find_home(run.user.partition(":")[0], _below(place))


def _script(run: RunCommand, place: Place) -> Iterator[HostMount]:
    if run.script is not None:
        path = place.staging / "script"
        path.write_bytes(run.script.content)
        path.chmod(0o755)
        yield HostMount(path, PurePosixPath(PIPES) / run.script.name)


@dataclass(slots=True)
class Placement:
    """The upper of one RUN.

    Attributes:
        tree: its directory, empty when the placing begins.
        image: what lies below it.
    """

    tree: Path
    image: Below
    _placed: list[Parts] = field(default_factory=list)

    def target(self, path: str) -> Parts:
        """Return where a target lies, without links.

        Raises:
            LinkError: it lies behind too many links.
        """
        return resolve(self.image, split(path))

    def put(self, path: Parts, source: Path) -> None:
        """Move a file or directory to a target; what the image has there is hidden meanwhile."""
        parent = self._folder(path[:-1])
        if source.is_dir():
            os.setxattr(source, OPAQUE, b"y")
        source.rename(parent / path[-1])
        self._placed.append(path)

    def expect(self, path: Parts) -> None:
        """Note a target that something else is mounted at, which leaves a mount point where the image has nothing."""
        self._placed.append(path)

    def take(self, path: Parts) -> Path | None:
        """Return where a target lies when the command ended; None if it was removed, or is behind a link now."""
        place = self.tree
        for part in path:
            place = place / part
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(place.lstat().st_mode):
                    continue
            return None
        return place

    def clean(self) -> None:
        """Remove the targets, and the directories that only they needed."""
        for path in self._placed:
            self._remove(path)
            for depth in range(len(path) - 1, 0, -1):
                folder = self.take(path[:depth])
                if folder is None or self.image.status(path[:depth]) is not None:
                    break
                with suppress(OSError):
                    folder.rmdir()

    def _remove(self, path: Parts) -> None:
        parent = self.take(path[:-1])
        if parent is None:
            return
        place = parent / path[-1]
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(place.lstat().st_mode):
                remove_tree(place)
            else:
                place.unlink()

    def _folder(self, path: Parts) -> Path:
        """Make the directories on the way as the image has them."""
        place = self.tree
        for depth, part in enumerate(path, 1):
            place = place / part
            if place.is_dir():
                continue
            info = self.image.status(path[:depth])
            place.mkdir(0o755)
            if info is not None:
                with suppress(PermissionError):  # an ordinary user has but one owner
                    os.chown(place, info.st_uid, info.st_gid)
                place.chmod(stat.S_IMODE(info.st_mode))
        return place


@contextmanager
def cache(store: Path, identity: str, owners: str, staging: Path, mode: int, owner: tuple[int, int]) -> Iterator[Path]:
    """A cache for the time of a RUN: the one that an earlier RUN left, or an empty one.

    Args:
        store: the directory of the caches.
        identity: which one.
        owners: whether files keep their owners; both kinds cannot use each other's.
        staging: where it is put meanwhile.
        mode: the permission bits of a new one.
        owner: the user and group of a new one.

    Yields:
        Where it lies; the caller moves it back if it moves it.
    """
    store.mkdir(mode=0o700, exist_ok=True)
    kept = store / hashlib.sha256(f"{owners} {identity}".encode("utf-8", "surrogateescape")).hexdigest()
    place = staging / f"cache-{kept.name[:16]}"
    try:
        kept.rename(place)
    except FileNotFoundError:
        place.mkdir()
        place.chmod(mode)
        with suppress(PermissionError):
            os.chown(place, *owner)
    try:
        yield place
    finally:
        with suppress(FileNotFoundError):
            if not kept.exists():  # else another RUN was sooner; the staging directory is removed with all in it
                place.rename(kept)
