"""Run SWE-ReX in sandboxes: a deployment with its runtime and configuration, without a server in the sandbox."""

from __future__ import annotations

from minisandbox.errors import MissingExtra

try:
    import swerex.runtime.abstract  # noqa: F401 - detect a missing package before the imports below fail
except ImportError as error:
    raise MissingExtra(
        f"minisandbox.integrations.swerex: {error}",
        reason="SWE-ReX is not installed",
        hint="pip install 'swe-minisandbox[swerex]'",
    ) from error

from minisandbox.integrations.swerex.deployment import MiniSandboxDeployment, MiniSandboxDeploymentConfig, register
from minisandbox.integrations.swerex.runtime import MiniSandboxRuntime

__all__ = ["MiniSandboxDeployment", "MiniSandboxDeploymentConfig", "MiniSandboxRuntime", "register"]
