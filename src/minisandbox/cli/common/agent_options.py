"""Options of commands that run agents: the fields of AgentOptions and AgentLimits."""

from __future__ import annotations

import argparse

from minisandbox.agents import AGENTS, AgentLimits, AgentOptions
from minisandbox.cli.common.fields import options_of, read_options

OPTIONS = options_of(AgentOptions, {"extra": "--agent-option"})
LIMITS = options_of(
    AgentLimits,
    {name: f"--{name.removesuffix('s')}-limit" for name in ("steps", "tokens", "context", "cost")}
    | {"seconds": "--time-limit"},
    none=True,
)


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--agent``, the agents' options and the limits of a rollout."""
    group = parser.add_argument_group("the agent")
    names = f"{', '.join(AGENTS)}, an agent of another package, or package.module:Class"
    group.add_argument("--agent", required=True, metavar="NAME", help=names)
    for option in OPTIONS:
        option.add(group)
    group = parser.add_argument_group("limits of a rollout, each a number or 'none'")
    for option in LIMITS:
        option.add(group)


def agent_options(args: argparse.Namespace) -> AgentOptions:
    """Read the options of agents that :func:`add_agent_arguments` declares.

    Raises:
        InvalidValue: a value is invalid.
    """
    return read_options(AgentOptions, args, OPTIONS)


def agent_limits(args: argparse.Namespace) -> AgentLimits:
    """Read the limits that :func:`add_agent_arguments` declares.

    Raises:
        InvalidValue: a limit is not positive.
    """
    return read_options(AgentLimits, args, LIMITS)
