"""SWE-ReX on sandboxes: a deployment, its runtime, and their configuration. No server runs inside."""

from __future__ import annotations

from minisandbox.errors import MissingExtra

try:
    import swerex.runtime.abstract  # noqa: F401 - report a missing package before the modules below fail
except ImportError as error:
    raise MissingExtra(
        f"minisandbox.integrations.swerex: {error}",
        reason="SWE-ReX is not installed",
        hint="pip install 'swe-minisandbox[swerex]'",
    ) from error

from minisandbox.integrations.swerex.deployment import MiniSandboxDeployment, MiniSandboxDeploymentConfig, register
from minisandbox.integrations.swerex.runtime import MiniSandboxRuntime

__all__ = ["MiniSandboxDeployment", "MiniSandboxDeploymentConfig", "MiniSandboxRuntime", "register"]
