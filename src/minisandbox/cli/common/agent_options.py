"""Options of commands that run agents: the fields of AgentOptions and AgentLimits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path

from minisandbox.agents import AGENTS, AgentLimits, AgentOptions
from minisandbox.cli.common.sandbox_options import parse_pairs

# field of AgentLimits -> name on the command line
_LIMITS = {
    "steps": "--step-limit",
    "seconds": "--time-limit",
    "tokens": "--token-limit",
    "context": "--context-limit",
    "cost": "--cost-limit",
}
_READ: Mapping[str, Callable[[str], object]] = {"str": str, "int": int, "float": float, "Path": Path}


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--agent``, the agents' options and the limits of a rollout."""
    group = parser.add_argument_group("the agent")
    group.add_argument("--agent", required=True, metavar="NAME", help=f"{', '.join(AGENTS)}, or package.module:Class")
    for one in fields(AgentOptions):
        text = str(one.metadata["help"])
        if one.name == "extra":
            group.add_argument(name_of(one), action="append", default=[], metavar=one.metadata["metavar"], help=text)
            continue
        group.add_argument(
            name_of(one),
            type=_READ[str(one.type).removesuffix(" | None")],
            default=one.default,
            choices=one.metadata.get("choices"),
            metavar=one.metadata.get("metavar"),
            help=text if one.default is None else f"{text} (default: {one.default})",
        )
    group = parser.add_argument_group("limits of a rollout, each a number or 'none'")
    for limit in fields(AgentLimits):
        group.add_argument(
            name_of(limit),
            type=_number(_READ[str(limit.type).removesuffix(" | None")]),
            default=limit.default,
            metavar=limit.metadata["metavar"],
            help=f"{limit.metadata['help']} (default: {'none' if limit.default is None else limit.default})",
        )


def name_of(one: Field[object]) -> str:
    """Return the command-line name of an option or a limit."""
    if one.name == "extra":
        return "--agent-option"
    return _LIMITS.get(one.name) or f"--{one.name.replace('_', '-')}"


def agent_options(args: argparse.Namespace) -> AgentOptions:
    """Read the options of agents that :func:`add_agent_arguments` declares.

    Raises:
        InvalidValue: a value cannot be used.
    """
    values = {one.name: getattr(args, one.name) for one in fields(AgentOptions) if one.name != "extra"}
    return AgentOptions(**values, extra=parse_pairs(args.agent_option, "--agent-option"))


def agent_limits(args: argparse.Namespace) -> AgentLimits:
    """Read the limits that :func:`add_agent_arguments` declares.

    Raises:
        InvalidValue: a limit is not positive.
    """
    dests = {one.name: name_of(one).removeprefix("--").replace("-", "_") for one in fields(AgentLimits)}
    return AgentLimits(**{name: getattr(args, dest) for name, dest in dests.items()})


def _number(read: Callable[[str], object]) -> Callable[[str], object]:
    def number(text: str) -> object:
        return None if text == "none" else read(text)

    return number
