"""Execute a RUN instruction in a sandbox on top of the layers below; the sandbox's writes become the next layer."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue
from minisandbox.images.dockerfile.copying import find_home, find_owner
from minisandbox.images.dockerfile.evaluation import PIPES
from minisandbox.images.dockerfile.parsing import refuse
from minisandbox.images.dockerfile.trees import split
from minisandbox.images.oci.pull import keeps_owners, owner_mode
from minisandbox.images.runner import (
    LEAST_READING,
    StepContext,
    build_limits,
    build_sandbox,
    failure,
    log_entry,
    write_log,
)
from minisandbox.images.tree import LinkError, Parts, resolve
from minisandbox.spec import ResolvedMount, RunCommand, RunMount
from minisandbox.store import Made
from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.store.blobs.unpack import OPAQUE
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import ExecResult, ImageSpec
from minisandbox.types import Mount as HostMount

if TYPE_CHECKING:
    from minisandbox.launch.plan import Tmpfs

_APT = b'APT::Sandbox::User "root";\n'
"""A setting that makes apt run as root, because a sandbox with a single user id cannot switch to the user _apt."""
_APT_PATH = PurePosixPath("/run/minisandbox-apt.conf")


def run_layer(run: RunCommand, context: StepContext, write_bind: Callable[[ResolvedMount, Path], None]) -> Made:
    """Execute a RUN instruction.

    Args:
        run: the instruction.
        context: the layers, files and session of the step.
        write_bind: creates a directory, and writes the files of a bind mount to its subpath ``m``.

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
    targets = MountTargets(upper / "tree", LowerLayers(tuple(reversed(context.layers))))
    with _mounted_files(run, context, write_bind, targets):
        result = _execute(run, context, upper, targets)
    write_log(context.log, log_entry(f"line {run.line}: {run.text}", result))
    if not result.ok:
        raise failure(context, run.text, result)
    return Made(upper / "tree", patience=max(context.step.timeout, LEAST_READING))


# --- mounts -----------------------------------------------------------------------------------------------------------


@contextmanager
def _mounted_files(
    run: RunCommand, context: StepContext, write_bind: Callable[[ResolvedMount, Path], None], targets: MountTargets
) -> Iterator[None]:
    """Move the files of a RUN's mounts into the upper directory while the body runs, and remove them afterwards."""
    with ExitStack() as stack:
        stack.callback(targets.clean)
        for index, mount in enumerate(run.mounts):
            options, staging = mount.wanted, context.staging / f"mount{index}"
            try:
                path = targets.resolve(options.target) if options.target else ()
                if options.kind == "bind":
                    write_bind(mount, staging)
                    targets.put(path, staging / "m")
                elif options.kind == "cache":
                    stack.enter_context(_mounted_cache(context, options, targets, path))
                elif path:
                    targets.expect(path)
            except LinkError as error:
                refuse(run, f"--mount at {options.target}: {error}")
        yield


@contextmanager
def _mounted_cache(context: StepContext, options: RunMount, targets: MountTargets, path: Parts) -> Iterator[None]:
    mode = 0o755 if options.mode is None else options.mode
    caches = context.session.store.root / "caches"
    with cache(caches, options.identity, owner_mode(), context.staging, mode, options.owner) as directory:
        targets.put(path, directory)
        yield
        if (final_path := targets.host_path(path)) is not None:
            final_path.rename(directory)


def _tmpfs(run: RunCommand, targets: MountTargets) -> Iterator[Tmpfs]:
    """Yield the tmpfs mounts, outer mounts first, each with the paths of the cache and bind mounts inside it."""
    from minisandbox.launch.plan import Tmpfs  # noqa: PLC0415 - an unchanged build runs no instruction

    mounts = [(targets.resolve(mount.wanted.target), mount.wanted) for mount in run.mounts if mount.wanted.target]
    visible = [path for path, options in mounts if options.kind in ("cache", "bind")]
    for path, options in sorted(mounts, key=lambda row: row[0]):
        if options.kind == "tmpfs":
            inner = ["/".join(child[len(path) :]) for child in visible if child != path and child[: len(path)] == path]
            yield Tmpfs("/".join(path), options.size, tuple(inner))


def _secrets(run: RunCommand, context: StepContext) -> Iterator[HostMount]:
    """Yield the secrets as mounts of host files: secrets usually belong in /run, and each sandbox has its own /run."""
    for index, mount in enumerate(run.mounts):
        options = mount.wanted
        if options.kind != "secret":
            continue
        content = dict(run.secrets).get(options.identity)
        if content is None and options.required:
            refuse(run, f"there is no secret {options.identity!r}", f"give it: --secret id={options.identity},src=FILE")
        if content is not None and options.target:
            path = context.staging / f"secret{index}"
            path.write_bytes(content)
            if keeps_owners():
                os.chown(path, *options.owner)
            path.chmod(0o400 if options.mode is None else options.mode)
            yield HostMount(path, PurePosixPath(options.target))


def _secret_variables(run: RunCommand) -> dict[str, str]:
    secrets = dict(run.secrets)
    return {
        mount.wanted.variable: secrets[mount.wanted.identity].decode("utf-8", "surrogateescape")
        for mount in run.mounts
        if mount.wanted.kind == "secret" and mount.wanted.variable and mount.wanted.identity in secrets
    }


# --- the command ------------------------------------------------------------------------------------------------------


def _execute(run: RunCommand, context: StepContext, upper: Path, targets: MountTargets) -> ExecResult:
    from minisandbox.images.python.index import StepAccess, host_access  # noqa: PLC0415 - slow to import
    from minisandbox.index_settings import host_settings  # noqa: PLC0415 - slow to import
    from minisandbox.sandbox.protocol.environment import network_environment  # noqa: PLC0415 - slow to import

    network, access = run.network, StepAccess(run.network, {})
    if network.mode == "host":
        access = host_access(None, host_settings(), f"line {run.line}")
    environment = {
        **network_environment(network), **access.environment, **dict(run.unkeyed),
        "HOME": find_home(run.user.partition(":")[0], targets.image), **dict(run.variables),
    }  # fmt: skip
    user = _user(run, targets.image)
    mounts = [*_script(run, context), *_secrets(run, context), *access.mounts]
    if not keeps_owners():
        apt_config = context.staging / "apt.conf"
        apt_config.write_bytes(_APT)
        mounts.append(HostMount(apt_config, _APT_PATH))
        environment.setdefault("APT_CONFIG", str(_APT_PATH))
    spec = ImageSpec(
        f"{context.image}: line {run.line}", context.layers, workdir=PurePosixPath(run.workdir), host_usr=False
    )
    box = build_sandbox(
        spec, build_limits(context.session.memory), network, tuple(mounts), upper, environment=environment,
        pretend_owners=not keeps_owners(), keep_tmp=True, tmpfs=tuple(_tmpfs(run, targets)),
    )  # fmt: skip
    with box, context.session.cancellation.running(box):
        try:
            return box.exec(
                list(run.argv), cwd=run.workdir, timeout=context.step.timeout, env=_secret_variables(run), user=user
            )
        except InvalidValue as error:
            refuse(run, f"USER {run.user}: {error}", "make the user in a RUN before")


def _user(run: RunCommand, image: LowerLayers) -> str | None:
    """Return the user of the command, or None for root. Without root privileges, sandboxes have no other user."""
    try:
        ids = find_owner(run.user, image)
    except ValueError as error:
        refuse(run, f"USER {run.user}: {error}", "make the user in a RUN before")
    return run.user if keeps_owners() and ids != (0, 0) else None


def _script(run: RunCommand, context: StepContext) -> Iterator[HostMount]:
    if run.script is not None:
        path = context.staging / "script"
        path.write_bytes(run.script.content)
        path.chmod(0o755)
        yield HostMount(path, PurePosixPath(PIPES) / run.script.name)


@dataclass(slots=True)
class MountTargets:
    """The mount points of a RUN. They are created in its overlay upper directory and removed after the command.

    Attributes:
        tree: the upper directory; initially empty.
        image: the layers below.
    """

    tree: Path
    image: LowerLayers
    _paths: list[Parts] = field(default_factory=list)

    def resolve(self, path: str) -> Parts:
        """Return the path of a mount point with links resolved in the image.

        Raises:
            LinkError: the path has too many links.
        """
        return resolve(self.image, split(path))

    def put(self, path: Parts, source: Path) -> None:
        """Move a file or directory to a mount point, where it hides the image's files until :meth:`clean`."""
        parent = self._folder(path[:-1])
        if source.is_dir():
            os.setxattr(source, OPAQUE, b"y")
        source.rename(parent / path[-1])
        self._paths.append(path)

    def expect(self, path: Parts) -> None:
        """Record the mount point of a tmpfs or secret, so that :meth:`clean` removes it from the upper directory."""
        self._paths.append(path)

    def host_path(self, path: Parts) -> Path | None:
        """Return the host path of a mount point; None if the command removed it, or replaced a parent by a link."""
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
        for path in self._paths:
            self._remove(path)
            for depth in range(len(path) - 1, 0, -1):
                folder = self.host_path(path[:depth])
                if folder is None or self.image.status(path[:depth]) is not None:
                    break
                with suppress(OSError):
                    folder.rmdir()

    def _remove(self, path: Parts) -> None:
        parent = self.host_path(path[:-1])
        if parent is None:
            return
        target = parent / path[-1]
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(target.lstat().st_mode):
                remove_tree(target)
            else:
                target.unlink()

    def _folder(self, path: Parts) -> Path:
        """Create a directory and its parents in the upper directory, with the image's modes and owners."""
        directory = self.tree
        for depth, part in enumerate(path, 1):
            directory = directory / part
            if directory.is_dir():
                continue
            status = self.image.status(path[:depth])
            directory.mkdir(0o755)
            if status is not None:
                with suppress(PermissionError):  # without root, all files belong to the current user
                    os.chown(directory, status.st_uid, status.st_gid)
                directory.chmod(stat.S_IMODE(status.st_mode))
        return directory


@contextmanager
def cache(caches: Path, identity: str, owners: str, staging: Path, mode: int, owner: tuple[int, int]) -> Iterator[Path]:
    """Move a cache directory to ``staging`` while a RUN uses it; use a new cache if it is missing or in use.

    Args:
        caches: the directory of all caches.
        identity: the id of the cache.
        owners: whether files keep their owners (``kept``) or all belong to one user (``one``); each mode has its own
            cache.
        staging: the directory to move the cache to.
        mode: the permission bits of a new cache.
        owner: the user and group ids of a new cache.

    Yields:
        The path of the cache; a caller that moves the cache must move it back.
    """
    caches.mkdir(mode=0o700, exist_ok=True)
    cache_path = caches / hashlib.sha256(f"{owners} {identity}".encode("utf-8", "surrogateescape")).hexdigest()
    directory = staging / f"cache-{cache_path.name[:16]}"
    try:
        cache_path.rename(directory)
    except FileNotFoundError:
        directory.mkdir()
        directory.chmod(mode)
        with suppress(PermissionError):
            os.chown(directory, *owner)
    try:
        yield directory
    finally:
        with suppress(FileNotFoundError):
            if not cache_path.exists():  # drop this cache if a concurrent RUN has already returned its own
                directory.rename(cache_path)
