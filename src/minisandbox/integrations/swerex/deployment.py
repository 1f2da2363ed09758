"""SWE-ReX's deployment, and its configuration."""

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
from minisandbox.integrations.settings import HOST, Found, SandboxSettings
from minisandbox.integrations.swerex.runtime import MiniSandboxRuntime
from minisandbox.sandbox import AsyncSandbox

_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_SECONDS = 60.0


class MiniSandboxDeploymentConfig(SandboxSettings):
    """What stands under ``deployment:``; SWE-agent puts the image of an instance into ``image``.

    Attributes:
        image: as of :class:`.SandboxSettings`.
        env: variables for every command.
        type: tells it from the others; do not change.
    """

    image: str = HOST
    env: dict[str, str] = Field(default_factory=dict)
    type: Literal["minisandbox"] = "minisandbox"

    def get_deployment(self) -> MiniSandboxDeployment:
        """Return a deployment that is not started."""
        return MiniSandboxDeployment.from_config(self)


class MiniSandboxDeployment(AbstractDeployment):
    """A sandbox as SWE-ReX deploys it. It ends with :meth:`stop`, with this object, or with the process.

    Args:
        logger: where to tell; SWE-ReX's own if None.
        settings: the keys of :class:`MiniSandboxDeploymentConfig`.
    """

    def __init__(self, *, logger: logging.Logger | None = None, **settings: object) -> None:
        self._config = MiniSandboxDeploymentConfig.model_validate(settings)
        self._runtime: MiniSandboxRuntime | None = None
        self._hooks = CombinedDeploymentHook()
        self.logger = logger or get_logger("rex-deploy")

    @classmethod
    def from_config(cls, config: MiniSandboxDeploymentConfig) -> Self:
        """Make one of its configuration."""
        return cls(**config.model_dump())

    def add_hook(self, hook: DeploymentHook) -> None:
        """Let somebody be told what goes on."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether it is started and its sandbox runs."""
        if self._runtime is None:
            return IsAliveResponse(is_alive=False, message="not started")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Find the image, build it if it is a task's and not there, and make a sandbox; again after :meth:`stop`.

        Raises:
            DeploymentStartupError: there is no such image, it cannot be built, or the sandbox cannot be made.
        """
        await self.stop()
        try:
            self._hooks.on_custom_step(f"Finding image {self._config.image}")
            found = await asyncio.to_thread(self._config.find, self._config.image)
            self._hooks.on_custom_step("Making sandbox")
            box = await self._make(found)
            self._runtime = MiniSandboxRuntime(box, logger=self.logger)
            await _know_base_commit(box, found)
        except MiniSandboxError as error:
            await self.stop()
            raise DeploymentStartupError(str(error)) from error
        self.logger.info("sandbox %s of %s in %.0f ms", box.id, found.image.name, 1000 * box.created_in)

    async def _make(self, found: Found) -> AsyncSandbox:
        return await AsyncSandbox.create(
            found.image.spec(),
            limits=self._config.checked_limits(),
            network=self._config.checked_network(),
            environment=self._config.env,
            labels={"by": "swe-rex"},
        )

    async def stop(self) -> None:
        """End the sessions and the sandbox; calling it again does nothing."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            try:
                await runtime.close()
            finally:
                await runtime.sandbox.stop()

    def __del__(self) -> None:
        """Stop it. What it overrides does so only where a loop was left open, and says nothing where not."""
        if getattr(self, "_runtime", None) is None:  # absent where the settings were refused
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # Python ends, and starts no threads any more: so do sandboxes
                asyncio.run(self.stop())
        else:
            self._stopping = loop.create_task(self.stop())  # a loop keeps no hold of its tasks

    @property
    def runtime(self) -> MiniSandboxRuntime:
        """The runtime.

        Raises:
            DeploymentNotStartedError: it was not started.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


async def _know_base_commit(box: AsyncSandbox, found: Found) -> None:
    """Let git know the one commit inside by the name that the data set has for it.

    SWE-agent checks out an instance's ``base_commit``. That commit is not there, since the history is not, but its
    files are: git-replace(1) shows ours in its place.
    """
    base = "" if found.task is None else found.task.base_commit
    if _COMMIT.fullmatch(base) and base != found.image.commit:
        command = ["git", "update-ref", f"refs/replace/{base}", "HEAD"]
        (await box.exec(command, timeout=_SECONDS)).check()


def register() -> None:
    """Let ``type: minisandbox`` be a deployment in configurations of programs that are imported from now on.

    SWE-ReX has a closed union of configurations and no entry points; programs take it into their own classes when they
    are imported.

    Raises:
        InvalidValue: SWE-agent has been imported already.
    """
    known = swerex.deployment.config
    if MiniSandboxDeploymentConfig in known.DeploymentConfig.__args__:
        return
    if "sweagent" in sys.modules:
        raise InvalidValue(
            "register() came after 'import sweagent', which has taken the list of deployments over already",
            hint="call it first, or use 'minisandbox sweagent -- ...'",
        )
    known.DeploymentConfig = known.DeploymentConfig | MiniSandboxDeploymentConfig
