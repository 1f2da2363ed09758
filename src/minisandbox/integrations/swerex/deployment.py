"""Deploy SWE-ReX in a sandbox, and register the deployment's configuration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from typing import Literal, Self

import swerex.deployment.config
from pydantic import Field
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
from swerex.runtime.abstract import IsAliveResponse
from swerex.utils.log import get_logger

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.integrations.settings import HOST, SandboxSettings, TaskImage
from minisandbox.integrations.swerex.runtime import MiniSandboxRuntime
from minisandbox.sandbox import AsyncSandbox

_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_GIT_TIMEOUT = 60.0


class MiniSandboxDeploymentConfig(SandboxSettings):
    """The section ``deployment:`` of a configuration. SWE-agent sets ``image`` to the image of each instance.

    Attributes:
        image: the image, as in :class:`.SandboxSettings`.
        env: environment variables of all commands.
        type: the name by which SWE-ReX selects this deployment; do not change it.
    """

    image: str = HOST
    env: dict[str, str] = Field(default_factory=dict)
    type: Literal["minisandbox"] = "minisandbox"

    def get_deployment(self) -> MiniSandboxDeployment:
        """Create a deployment with this configuration; the caller starts it."""
        return MiniSandboxDeployment.from_config(self)


class MiniSandboxDeployment(AbstractDeployment):
    """A SWE-ReX deployment in a sandbox, which stops on :meth:`stop`, on deletion, or when the process exits.

    Args:
        logger: the logger; None for SWE-ReX's logger.
        settings: the keys of :class:`MiniSandboxDeploymentConfig`.
    """

    def __init__(self, *, logger: logging.Logger | None = None, **settings: object) -> None:
        self._config = MiniSandboxDeploymentConfig.model_validate(settings)
        self._runtime: MiniSandboxRuntime | None = None
        self._hooks = CombinedDeploymentHook()
        self.logger = logger or get_logger("rex-deploy")

    @classmethod
    def from_config(cls, config: MiniSandboxDeploymentConfig) -> Self:
        """Create a deployment from its configuration."""
        return cls(**config.model_dump())

    def add_hook(self, hook: DeploymentHook) -> None:
        """Add a hook, which is called at each step of the start."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Return whether the deployment has started and its sandbox is running."""
        if self._runtime is None:
            return IsAliveResponse(is_alive=False, message="not started")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Create the sandbox; build the missing image of a task first. May be called again after :meth:`stop`.

        Raises:
            DeploymentStartupError: there is no such image, the build fails, or the sandbox cannot be created.
        """
        await self.stop()
        try:
            self._hooks.on_custom_step(f"Finding image {self._config.image}")
            task_image = await asyncio.to_thread(self._config.find, self._config.image)
            self._hooks.on_custom_step("Making sandbox")
            box = await self._create_sandbox(task_image)
            self._runtime = MiniSandboxRuntime(box, logger=self.logger)
            await _alias_base_commit(box, task_image)
        except MiniSandboxError as error:
            await self.stop()
            raise DeploymentStartupError(str(error)) from error
        self.logger.info("sandbox %s of %s in %.0f ms", box.id, task_image.image.name, 1000 * box.created_in)

    async def _create_sandbox(self, task_image: TaskImage) -> AsyncSandbox:
        return await AsyncSandbox.create(
            task_image.image.spec(),
            limits=self._config.checked_limits(),
            network=self._config.checked_network(),
            environment=self._config.env,
            labels={"by": "swe-rex"},
        )

    async def stop(self) -> None:
        """Close the sessions and stop the sandbox; further calls do nothing."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            try:
                await runtime.close()
            finally:
                await runtime.sandbox.stop()

    def __del__(self) -> None:
        """Stop the sandbox, even without a running event loop, unlike the base class."""
        if getattr(self, "_runtime", None) is None:  # the attribute is missing if the settings were invalid
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # at exit Python starts no threads, and stops all sandboxes anyway
                asyncio.run(self.stop())
        else:
            self._stopping = loop.create_task(self.stop())  # keep a reference: event loops hold only weak references

    @property
    def runtime(self) -> MiniSandboxRuntime:
        """The runtime.

        Raises:
            DeploymentNotStartedError: the deployment has not started.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


async def _alias_base_commit(box: AsyncSandbox, task_image: TaskImage) -> None:
    """Make the sandbox's only commit available under the data set's ``base_commit``.

    SWE-agent checks out ``base_commit``, but the image contains the files without the history. A replacement ref (see
    git-replace(1)) makes git use the image's commit instead.
    """
    base = "" if task_image.task is None else task_image.task.base_commit
    if _COMMIT.fullmatch(base) and base != task_image.image.commit:
        command = ["git", "update-ref", f"refs/replace/{base}", "HEAD"]
        (await box.exec(command, timeout=_GIT_TIMEOUT)).check()


def register() -> None:
    """Register ``type: minisandbox`` as a deployment for all programs imported later.

    SWE-ReX has a closed union of configurations and no entry points. Programs copy the union when they are imported, so
    register the deployment first.

    Raises:
        InvalidValue: SWE-agent has already been imported.
    """
    config_module = swerex.deployment.config
    if MiniSandboxDeploymentConfig in config_module.DeploymentConfig.__args__:
        return
    if "sweagent" in sys.modules:
        raise InvalidValue(
            "register() was called after 'import sweagent', which has already copied the list of deployments",
            hint="call it before the import, or use 'minisandbox sweagent -- ...'",
        )
    config_module.DeploymentConfig = config_module.DeploymentConfig | MiniSandboxDeploymentConfig
