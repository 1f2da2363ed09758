"""Run SWE-agent's own command line with the additional deployment ``minisandbox``.

SWE-agent copies SWE-ReX's list of deployments on import, and has no entry point for other deployments. This module adds
``minisandbox`` to the list, then starts the unmodified SWE-agent in this process.
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
        arguments: SWE-agent's arguments, for instance ``["run-batch", "--instances.deployment.type", "minisandbox"]``.

    Returns:
        The exit status: 1 if SWE-agent failed; its traceback is printed.

    Raises:
        MissingExtra: SWE-agent or SWE-ReX is not installed.
        HostError: SWE-agent is installed without its configuration files.
        SystemExit: SWE-agent raised it.
    """
    register()
    main = _import_main()
    sys.argv = ["sweagent", *arguments]  # SWE-agent shows this program name in its messages
    try:
        main(list(arguments))
    except Exception:  # noqa: BLE001 - show errors as SWE-agent would show them
        traceback.print_exc()
        return 1
    return 0


def _import_main() -> Callable[[list[str]], object]:
    try:
        module = importlib.import_module("sweagent.run.run")
    except ImportError as error:
        raise MissingExtra(
            f"SWE-agent cannot be imported: {error}",
            reason="it is not installed, or the index's unrelated package sweagent of 2024 is",
            hint="run pip install -e CHECKOUT, with a checkout of github.com/SWE-agent/SWE-agent",
        ) from error
    except AssertionError as error:
        raise HostError(
            f"SWE-agent finds no directory {error}",
            reason="it was installed without its checkout",
            hint="set SWE_AGENT_CONFIG_DIR, SWE_AGENT_TOOLS_DIR and SWE_AGENT_TRAJECTORY_DIR to those of a checkout",
        ) from error
    main: Callable[[list[str]], object] = module.main
    return main
