"""SWE-agent's own command line, with ``minisandbox`` among its deployments.

SWE-agent takes SWE-ReX's list of deployments into its classes when it is imported, and has no place for others. So ours
is added to that list first, and then SWE-agent is started as it is, in this process.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence

from minisandbox.errors import HostError, MissingExtra
from minisandbox.integrations.swerex import register


def launch(arguments: Sequence[str]) -> int:
    """Run SWE-agent.

    Args:
        arguments: its command line, such as ``["run-batch", "--instances.deployment.type", "minisandbox"]``.

    Returns:
        The exit status: 1 where SWE-agent failed, and has said why.

    Raises:
        MissingExtra: SWE-agent or SWE-ReX is not installed.
        HostError: it is installed without its configuration files.
        SystemExit: SWE-agent ended by it.
    """
    register()
    main = _entry()
    sys.argv = ["sweagent", *arguments]  # its messages name it
    try:
        main(list(arguments))
    except Exception:  # noqa: BLE001 - its mistakes are not ours: they are shown as they would be without us
        traceback.print_exc()
        return 1
    return 0


def _entry() -> Callable[[list[str]], object]:
    try:
        module = importlib.import_module("sweagent.run.run")
    except ImportError as error:
        raise MissingExtra(
            f"SWE-agent cannot be imported: {error}",
            reason="it is not installed, or it is the package of 2024 that a package index calls sweagent",
            hint="pip install -e CHECKOUT, of github.com/SWE-agent/SWE-agent",
        ) from error
    except AssertionError as error:
        raise HostError(
            f"SWE-agent finds no directory {error}",
            reason="it was installed without its checkout",
            hint="set SWE_AGENT_CONFIG_DIR, SWE_AGENT_TOOLS_DIR and SWE_AGENT_TRAJECTORY_DIR to directories of one",
        ) from error
    entry: Callable[[list[str]], object] = module.main
    return entry
