"""Execute a RUN instruction in a sandbox on top of the layers below; the sandbox's writes become the next layer."""

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
from minisandbox.images.python.index import StepAccess, host_access
from minisandbox.images.runner import (
    LEAST_READING,
    StepContext,
    build_limits,
    build_sandbox,
    failure,
    logged,
    write_log,
)
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
"""A setting that keeps apt running as root, because a sandbox with a single id cannot switch to the user _apt."""
_APT_PLACE = PurePosixPath("/run/minisandbox-apt.conf")


def run_layer(run: RunCommand, context: StepContext, show: Callable[[ResolvedMount, Path], None]) -> Made:
    """Execute a RUN instruction.

    Args:
        run: the instruction.
        context: the layers, files and session of the step.
        show: writes the files of a bind mount to ``m`` in a new directory.

    Returns:
        The tree of all files that the command wrote.

    Raises:
        BuildError: the command failed or timed out; its log is kept.
        DockerfileError: a mount or a user is invalid.
        DiskFull: the store's disk is full.
        SandboxCreationError: the sandbox could not be created.
    """
    upper = context.staging / "upper"
    for path in (upper, upper / "tree"):
        path.mkdir(mode=0o755)
        path.chmod(0o755)
    placement = Placement(upper / "tree", _below(context))
    with _placed(run, context, show, placement):
        result = _execute(run, context, upper, placement)
    write_log(context.log, logged(f"line {run.line}: {run.text}", result))
    if not result.ok:
        raise failure(context, run.text, result)
    return Made(upper / "tree", patience=max(context.timeout, LEAST_READING))


def _below(context: StepContext) -> Below:
    return Below(tuple(reversed(context.layers)))


# --- mounts -----------------------------------------------------------------------------------------------------------


@contextmanager
def _placed(
    run: RunCommand, context: StepContext, show: Callable[[ResolvedMount, Path], None], placement: Placement
) -> Iterator[None]:
    """Place the files of a RUN's mounts in the upper directory while the body runs, and remove them afterwards."""
    with ExitStack() as stack:
        stack.callback(placement.clean)
        for number, mount in enumerate(run.mounts):
            try:
                stack.enter_context(_place(context, show, placement, mount, context.staging / f"mount{number}"))
            except LinkError as error:
                refuse(run, f"--mount at {mount.wanted.target}: {error}")
        yield


@contextmanager
def _place(
    context: StepContext,
    show: Callable[[ResolvedMount, Path], None],
    placement: Placement,
    mount: ResolvedMount,
    work: Path,
) -> Iterator[None]:
    options = mount.wanted
    if options.kind in ("secret", "tmpfs"):
        if options.target:
            placement.expect(placement.target(options.target))
        yield
        return
    path = placement.target(options.target)
    if options.kind == "cache":
        owners = "kept" if keeps_owners() else "one"
        mode = 0o755 if options.mode is None else options.mode
        with cache(
            context.session.store.root / "caches", options.identity, owners, context.staging, mode, options.owner
        ) as cached:
            placement.put(path, cached)
            yield
            if (final_path := placement.take(path)) is not None:
                final_path.rename(cached)
        return
    show(mount, work)
    placement.put(path, work / "m")
    yield


def _tmpfs(run: RunCommand, placement: Placement) -> Iterator[Tmpfs]:
    """Yield the tmpfs mounts, outer mounts first, each with the paths of cache and bind mounts inside."""
    paths = [(placement.target(mount.wanted.target), mount.wanted) for mount in run.mounts if mount.wanted.target]
    for path, options in sorted(paths, key=lambda row: row[0]):
        if options.kind == "tmpfs":
            below = (there for there, other in paths if other.kind in ("cache", "bind") and there[: len(path)] == path)
            shown = tuple("/".join(there[len(path) :]) for there in below if there != path)
            yield Tmpfs("/".join(path), options.size, shown)


def _secrets(run: RunCommand, context: StepContext) -> Iterator[HostMount]:
    """Yield the files of secrets as host mounts, because each sandbox has its own /run, where secrets usually lie."""
    for number, mount in enumerate(run.mounts):
        options = mount.wanted
        if options.kind != "secret":
            continue
        content = dict(run.secrets).get(options.identity)
        if content is None and options.required:
            refuse(run, f"there is no secret {options.identity!r}", f"give it: --secret id={options.identity},src=FILE")
        if content is not None and options.target:
            path = context.staging / f"secret{number}"
            path.write_bytes(content)
            if keeps_owners():
                os.chown(path, *options.owner)
            path.chmod(0o400 if options.mode is None else options.mode)
            yield HostMount(path, PurePosixPath(options.target))


def _secret_variables(run: RunCommand) -> dict[str, str]:
    options = [mount.wanted for mount in run.mounts if mount.wanted.kind == "secret" and mount.wanted.variable]
    return {
        option.variable: dict(run.secrets)[option.identity].decode("utf-8", "surrogateescape")
        for option in options
        if option.identity in dict(run.secrets)
    }


# --- the command ------------------------------------------------------------------------------------------------------


def _execute(run: RunCommand, context: StepContext, upper: Path, placement: Placement) -> ExecResult:
    network = run.network
    outside = (
        host_access(None, host_settings(), f"line {run.line}") if network.mode == "host" else StepAccess(network, {})
    )
    environment = {
        **network_environment(network), **outside.environment, **dict(run.unkeyed),
        "HOME": _home(run, context), **dict(run.variables),
    }  # fmt: skip
    user = _user(run, context)
    mounts = [*_script(run, context), *_secrets(run, context), *outside.mounts]
    if not keeps_owners():
        apt = context.staging / "apt.conf"
        apt.write_bytes(_APT)
        mounts.append(HostMount(apt, _APT_PLACE))
        environment.setdefault("APT_CONFIG", str(_APT_PLACE))
    name = f"{context.image}: line {run.line}"
    spec = ImageSpec(name, context.layers, workdir=PurePosixPath(run.workdir), host_usr=False)
    limits = build_limits(context.session.memory)
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
    with box, context.session.cancellation.running(box):
        try:
            return box.exec(
                list(run.argv), cwd=run.workdir, timeout=context.timeout, env=_secret_variables(run), user=user
            )
        except InvalidValue as error:
            refuse(run, f"USER {run.user}: {error}", "make the user in a RUN before")


def _user(run: RunCommand, context: StepContext) -> str | None:
    """Return the user of the command; None for root, the only user if an ordinary user runs MiniSandbox."""
    try:
        ids = find_owner(run.user, _below(context))
    except ValueError as error:
        refuse(run, f"USER {run.user}: {error}", "make the user in a RUN before")
    return run.user if keeps_owners() and ids != (0, 0) else None


def _home(run: RunCommand, context: StepContext) -> str:
    """Return the home directory of a RUN's user, even if the command runs as root instead."""
    return find_home(run.user.partition(":")[0], _below(context))


def _script(run: RunCommand, context: StepContext) -> Iterator[HostMount]:
    if run.script is not None:
        path = context.staging / "script"
        path.write_bytes(run.script.content)
        path.chmod(0o755)
        yield HostMount(path, PurePosixPath(PIPES) / run.script.name)


@dataclass(slots=True)
class Placement:
    """Places the files of mounts in the overlay upper directory of a RUN, and removes them afterwards.

    Attributes:
        tree: the upper directory; initially empty.
        image: the layers below.
    """

    tree: Path
    image: Below
    _placed: list[Parts] = field(default_factory=list)

    def target(self, path: str) -> Parts:
        """Return the path of a mount point with links resolved in the image.

        Raises:
            LinkError: the path has too many links.
        """
        return resolve(self.image, split(path))

    def put(self, path: Parts, source: Path) -> None:
        """Move a file or directory to a mount point; it hides the image's files there until :meth:`clean`."""
        parent = self._folder(path[:-1])
        if source.is_dir():
            os.setxattr(source, OPAQUE, b"y")
        source.rename(parent / path[-1])
        self._placed.append(path)

    def expect(self, path: Parts) -> None:
        """Record the mount point of a tmpfs or secret, so that :meth:`clean` removes it from the upper directory."""
        self._placed.append(path)

    def take(self, path: Parts) -> Path | None:
        """Return the host path of a mount point; None if the command removed it or replaced a directory by a link."""
        target = self.tree
        for part in path:
            target = target / part
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(target.lstat().st_mode):
                    continue
            return None
        return target

    def clean(self) -> None:
        """Remove the mount points, and parent directories that were created only for them."""
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
        target = parent / path[-1]
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(target.lstat().st_mode):
                remove_tree(target)
            else:
                target.unlink()

    def _folder(self, path: Parts) -> Path:
        """Create the parent directories with the image's modes and owners."""
        directory = self.tree
        for depth, part in enumerate(path, 1):
            directory = directory / part
            if directory.is_dir():
                continue
            info = self.image.status(path[:depth])
            directory.mkdir(0o755)
            if info is not None:
                with suppress(PermissionError):  # without root, all files belong to the current user
                    os.chown(directory, info.st_uid, info.st_gid)
                directory.chmod(stat.S_IMODE(info.st_mode))
        return directory


@contextmanager
def cache(store: Path, identity: str, owners: str, staging: Path, mode: int, owner: tuple[int, int]) -> Iterator[Path]:
    """Lend a cache directory to a RUN: that of an earlier RUN, or a new empty directory.

    Args:
        store: the directory of all caches.
        identity: the id of the cache.
        owners: whether files keep their owners (``kept`` or ``one``); both modes have separate caches.
        staging: the directory that the cache is moved to while in use.
        mode: the permission bits of a new cache.
        owner: the user and group ids of a new cache.

    Yields:
        The path of the cache; a caller that moves the cache must move it back.
    """
    store.mkdir(mode=0o700, exist_ok=True)
    cached = store / hashlib.sha256(f"{owners} {identity}".encode("utf-8", "surrogateescape")).hexdigest()
    directory = staging / f"cache-{cached.name[:16]}"
    try:
        cached.rename(directory)
    except FileNotFoundError:
        directory.mkdir()
        directory.chmod(mode)
        with suppress(PermissionError):
            os.chown(directory, *owner)
    try:
        yield directory
    finally:
        with suppress(FileNotFoundError):
            if not cached.exists():  # another RUN may have returned its cache first
                directory.rename(cached)
