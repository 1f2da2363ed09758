"""A Harbor environment on sandboxes: ``harbor run --env minisandbox.integrations.harbor:MiniSandboxEnvironment``."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from minisandbox.errors import (
    BuildError,
    DockerfileError,
    FileAccessError,
    ImageRefused,
    InvalidValue,
    MissingExtra,
    NotFound,
)
from minisandbox.grade import run_entrypoint
from minisandbox.images import read_dockerfile
from minisandbox.images.image import Image
from minisandbox.images.plan import Planner
from minisandbox.images.schedule import Building
from minisandbox.sandbox import AsyncSandbox, Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.sandbox.io_async import call_blocking
from minisandbox.spec import OciBase
from minisandbox.store import Store
from minisandbox.types import ExecResult, Limits, Mount, Network, Outcome
from minisandbox.values import GiB, MiB

try:
    from harbor.environments.base import BaseEnvironment, SandboxBuildFailedError
    from harbor.environments.base import ExecResult as HarborResult
    from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
    from harbor.environments.definition import (
        COMPOSE_FILE_NAME,
        DOCKERFILE_NAME,
        require_agent_environment_definition,
        should_use_prebuilt_docker_image,
    )
    from harbor.models.task.config import NetworkMode
    from harbor.models.trial.config import ResourceMode
except ImportError as error:
    raise MissingExtra(
        f"minisandbox.integrations.harbor: {error}",
        reason="Harbor is not installed, or is older than 0.25",
        hint="pip install 'harbor>=0.25', which needs Python 3.12",
    ) from error

_DISK = 10 * GiB
"""The storage limit of a task without its own limit; Harbor's own tasks set the same value."""
_OUTPUT = 16 * MiB
_PERMANENT_ERRORS = (BuildError, DockerfileError, ImageRefused, InvalidValue, NotFound)
_NOT_STARTED = 126


class MiniSandboxEnvironment(BaseEnvironment):
    """Harbor's environment: one sandbox per trial, and one sandbox per separate verifier.

    Args:
        public: the network access of tasks with the network ``public``. ``proxy`` allows HTTP and HTTPS to every host,
            through the sandbox's own proxy; ``host`` shares the host's network, including its ports and its loopback.
        allow_private: whether the proxy may connect to hosts with private addresses.
        settings: the settings of Harbor's base class.
    """

    def __init__(
        self, *, public: Literal["proxy", "host"] = "proxy", allow_private: bool = False, **settings: Any
    ) -> None:
        if public not in ("proxy", "host"):
            raise InvalidValue(f"public={public!r}", hint="write --ek public=proxy or --ek public=host")
        self._public = public
        self._allow_private = allow_private
        self._box: AsyncSandbox | None = None
        super().__init__(**settings)

    # --- capabilities ------------------------------------------------------------------------------------------------

    @staticmethod
    def type() -> str:
        """Return the name of this environment in Harbor's results."""
        return "minisandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """The features that tasks may use. Before a task starts, Harbor rejects it if it needs other features."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Return the supported resource policies: limits, but no reservations."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        """Reject tasks that cannot run in a sandbox.

        Raises:
            InvalidValue: the task has several services, or a writable mount.
            FileNotFoundError: the task has neither a Dockerfile nor an image.
        """
        compose = self.environment_dir / COMPOSE_FILE_NAME
        if compose.exists():
            raise InvalidValue(
                f"{compose}: tasks of several services are not supported",
                reason="a trial has one sandbox",
                hint="run this task with Harbor's own docker or podman environment",
            )
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        self._read_mounts()

    def _read_mounts(self) -> list[Mount]:
        for mount in self._host_mounts:
            if mount["type"] != "bind" or not mount.get("read_only"):
                raise InvalidValue(
                    f"the mount at {mount['target']} is not a read-only bind mount",
                    reason="a sandbox writes nothing to the host",
                    hint='add "read_only": true to it, or leave it out: Harbor downloads logs and artifacts',
                )
        return [Mount(Path(mount["source"]), PurePosixPath(mount["target"])) for mount in self._host_mounts]

    # --- start and stop ----------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Build or pull the image if the store lacks it, and create the sandbox.

        Args:
            force_build: whether to use the task's Dockerfile even if the task also names an image. Layers in the store
                are reused.

        Raises:
            SandboxBuildFailedError: the image cannot be built or pulled, and a retry would not help.
            MiniSandboxError: a registry does not respond, or the sandbox cannot be created.
        """
        try:
            image = await self._find_image(force_build)
            self._box = await AsyncSandbox.create(
                image.spec(),
                limits=await asyncio.to_thread(self._limits),
                network=self._network(),
                mounts=self._read_mounts(),
                environment=self._startup_env(),
                labels={"by": "harbor", "trial": self.session_id},
            )
        except _PERMANENT_ERRORS as error:
            raise SandboxBuildFailedError(str(error)) from error
        if entrypoint := self._box.image.entrypoint:
            await call_blocking(run_entrypoint, Sandbox.attach(self._box.id), entrypoint)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def _find_image(self, force_build: bool) -> Image:
        store = await asyncio.to_thread(Store.open)
        reference = self.task_env_config.docker_image
        if should_use_prebuilt_docker_image(self.environment_dir, docker_image=reference, force_build=force_build):
            return await asyncio.to_thread(Planner(store).container, OciBase(reference))
        folder = self.environment_dir
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"harbor-{self.environment_name}")[:160] + f"-{self.environment_id[:12]}"
        recipes = {name: lambda: read_dockerfile(folder / DOCKERFILE_NAME, folder, store=store)}
        building = Building(recipes, store=store)
        try:
            return await asyncio.wrap_future(building.images[name])
        except asyncio.CancelledError:  # for instance after the task's build_timeout_sec
            await asyncio.shield(asyncio.to_thread(building.cancel))
            raise

    def _limits(self) -> Limits:
        """Return the task's limits.

        A sandbox keeps its files in memory, unlike a container. The default policy therefore adds the storage limit to
        the memory limit; an explicit limit (``--memory-enforcement-policy limit``) is exact. The default policy for
        CPUs allows trials on hosts without control groups, where the CPU limit is not enforced.
        """
        disk = _DISK if self._effective_storage_mb is None else self._effective_storage_mb * MiB
        memory_mb = self._effective_memory_mb
        memory = Limits().memory if memory_mb is None else memory_mb * MiB
        if memory is not None and self._resource_mode("memory") is not ResourceMode.LIMIT:
            memory += disk
        cpus = self._effective_cpus
        is_enforced = "cpu" in current_controller().launcher.enforcement
        if cpus is not None and not is_enforced and self._resource_mode("cpu") is ResourceMode.AUTO:
            self.logger.warning("cpus = %s is not enforced: there is no control group with a cpu controller", cpus)
            cpus = None
        return Limits(memory=memory, cpu=cpus, disk=disk, output=_OUTPUT)

    def _network(self) -> Network:
        policy = self.network_policy
        is_public = policy.network_mode is NetworkMode.PUBLIC
        if is_public and self._public == "host":
            return Network.host()
        hosts = ["*"] if is_public else policy.allowed_hosts
        return Network.allow(*hosts, private=self._allow_private) if hosts else Network.off()

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 - the next trial reuses the image
        """Stop the sandbox. Its image stays in the store; remove it with ``minisandbox image rm``."""
        if self._box is not None:
            await self._box.stop()

    async def attach(self) -> None:
        """Open a shell in the sandbox, and wait until it exits."""
        argv = [sys.executable, "-m", "minisandbox", "sandbox", "shell", self.sandbox.id]
        await (await asyncio.create_subprocess_exec(*argv)).wait()

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox.

        Raises:
            RuntimeError: the environment has not started.
        """
        if self._box is None:
            raise RuntimeError(f"the environment {self.session_id} was not started")
        return self._box

    # --- commands ----------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> HarborResult:
        """Run a command with bash.

        Returns:
            The output and exit status. The status is 128 plus the number for a signal. If the directory or the user
            does not exist, the status is 126, and stderr contains the error.

        Raises:
            RuntimeError: the command ran longer than ``timeout_sec``; all its processes were killed.
            SandboxGone: the sandbox has ended.
        """
        try:
            result = await self._run(
                command,
                cwd=cwd or self.task_env_config.workdir,
                env=self._merge_env(env),
                timeout=timeout_sec,
                user=self._resolve_user(user),
            )
        except (FileAccessError, InvalidValue) as error:
            return HarborResult(stdout="", stderr=f"{error}\n", return_code=_NOT_STARTED)
        if result.outcome is Outcome.TIMEOUT:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return HarborResult(stdout=result.stdout, stderr=result.stderr, return_code=result.shell_status)

    async def _run(self, command: str, *, env: Mapping[str, str] | None, **options: Any) -> ExecResult:
        """Run a command, and stream its output if Harbor has set a callback for output."""
        emit = self._output_callback()
        if emit is None:
            return await self.sandbox.exec(command, env=env, **options)
        async with await self.sandbox.start(command, env=env, **options) as process:
            await process.close_stdin()
            async for event in process.events():
                if isinstance(event, ExecResult):
                    return event
                await emit(event.data.decode("utf-8", "replace"), event.stream)
        raise RuntimeError(f"the output of {command!r} has no end")  # unreachable: events() ends with the result

    # --- files -------------------------------------------------------------------------------------------------------

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a host file into the sandbox, as root. ``target_path`` may be an existing directory, or end in ``/``."""
        if target_path.endswith("/") or await self.is_dir(target_path, user="root"):
            target_path = str(PurePosixPath(target_path, Path(source_path).name))
        await self.sandbox.files.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy the content of a host directory into a directory of the sandbox, as root."""
        await self.sandbox.files.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file from the sandbox to the host. ``target_path`` may also be an existing directory."""
        target = Path(target_path)
        if target.is_dir():
            target /= PurePosixPath(source_path).name
        target.parent.mkdir(parents=True, exist_ok=True)
        await self.sandbox.files.download(source_path, target)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the content of a sandbox directory to the host, except special files and links that point outside."""
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as staging:
            transfer = await self.sandbox.files.download(source_dir, Path(staging, "tree"))
            _merge(Path(staging, "tree"), target)
        for name, reason in transfer.skipped:
            self.logger.debug("%s/%s was not downloaded: %s", source_dir, name, reason)


def _merge(source: Path, target: Path) -> None:
    """Move the entries of a tree into a directory; replace existing files and links, and never follow links."""
    for entry in os.scandir(source):
        destination = target / entry.name
        if not entry.is_dir(follow_symlinks=False):
            if destination.is_dir() and not destination.is_symlink():
                shutil.rmtree(destination)
            os.replace(entry.path, destination)
            continue
        if destination.is_symlink() or not destination.is_dir():
            destination.unlink(missing_ok=True)
            destination.mkdir()
        _merge(Path(entry.path), destination)
