"""``minisandbox sweagent``: run SWE-agent in sandboxes."""

from __future__ import annotations

import argparse
import os

from minisandbox.errors import InvalidValue

_EXAMPLE = "minisandbox sweagent --tasks TASKS -- run-batch --instances.deployment.type minisandbox ..."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument(
        "--tasks",
        metavar="TASKS",
        help="build these tasks' images on demand: a bundled set's name, a file, a folder, or hub:OWNER/NAME",
    )
    parser.add_argument("command", metavar="ARGS", nargs=argparse.REMAINDER, help="after --: SWE-agent's command line")
    parser.set_defaults(run=run, kept="SWE-agent's output is kept")


def run(args: argparse.Namespace) -> int:
    """Run SWE-agent; return its exit status, or 1 if it failed."""
    if args.command or not args.rest:
        raise InvalidValue("SWE-agent's command line must follow --", hint=f"for instance {_EXAMPLE}")
    from minisandbox.integrations.settings import TASKS_VARIABLE  # noqa: PLC0415 - slow to import
    from minisandbox.integrations.sweagent import launch  # noqa: PLC0415 - SWE-ReX takes a second to import

    if args.tasks:
        os.environ[TASKS_VARIABLE] = args.tasks
    return launch(args.rest)
