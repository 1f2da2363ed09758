"""Create agents: this package's own and plug-ins by name, others by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minisandbox.agents.baselines import EmptyAgent, OracleAgent
from minisandbox.agents.bash import BashAgent
from minisandbox.agents.command import CommandAgent, load_recipe
from minisandbox.agents.options import AgentOptions
from minisandbox.agents.replay import ReplayAgent
from minisandbox.agents.session import Agent
from minisandbox.errors import InvalidValue, MiniSandboxError, NotFound
from minisandbox.plugins import load_plugin, plugin_names


@dataclass(frozen=True, slots=True)
class _Entry:
    """An agent of this package.

    Attributes:
        create: a function that creates the agent.
        options: the names of the options that the agent accepts.
    """

    create: Callable[[AgentOptions], Agent]
    options: frozenset[str]


def _replay(options: AgentOptions) -> Agent:
    if options.recording is None:
        raise InvalidValue("the replay agent needs a recording", hint="add --recording PATH")
    return ReplayAgent.load(options.recording)


_BASH_OPTIONS = frozenset({"action_format", "prompt", "shell", "command_timeout", "observation_chars", "format_errors"})
_AGENTS: Mapping[str, _Entry] = {
    "bash": _Entry(BashAgent, _BASH_OPTIONS),
    "oracle": _Entry(lambda _: OracleAgent(), frozenset()),
    "empty": _Entry(lambda _: EmptyAgent(), frozenset()),
    "replay": _Entry(_replay, frozenset({"recording"})),
}
AGENTS = tuple(_AGENTS)
"""The names of this package's agents."""


def open_agent(name: str, options: AgentOptions | None = None) -> Agent:
    """Create an agent.

    Args:
        name: ``bash``, ``oracle``, ``empty`` or ``replay``; ``command:RECIPE`` (:func:`.load_recipe`); the name of a
            plug-in; or ``package.module:Class``. Plug-ins and imported classes are called with ``options.extra`` as
            keyword arguments.
        options: the agent's options; None for the defaults.

    Raises:
        NotFound: there is no such agent.
        InvalidValue: the agent does not accept a given option, or the option's value is invalid.
    """
    options = options or AgentOptions()
    entry = _AGENTS.get(name)
    command, _, recipe = name.partition(":")
    if command == "command":
        entry = _Entry(lambda _: CommandAgent(load_recipe(recipe)), frozenset())
    accepted = entry.options if entry else frozenset({"extra"})
    plugin = load_plugin("agents", name, AGENTS) if entry is None and ":" not in name else None
    if entry is None and plugin is None and ":" not in name:
        names = (*AGENTS, *plugin_names("agents", AGENTS))
        raise NotFound(
            f"there is no agent {name!r}", hint=f"use {', '.join(names)}, command:RECIPE or package.module:Class"
        )
    rejected = sorted(options.given() - accepted)
    if rejected:
        option = "agent_option" if rejected[0] == "extra" else rejected[0]
        hint = f"its options are {', '.join(sorted(accepted))}" if accepted else "leave it out"
        raise InvalidValue(f"the agent {name!r} has no option {option!r}", hint=hint)
    return entry.create(options) if entry else _create(name, plugin or _import(name), options)


def _import(name: str) -> object:
    module, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module), class_name)
    except Exception as error:  # the module is the user's code, which may raise any exception
        raise NotFound(
            f"the agent {name!r} cannot be imported: {_describe(error)}",
            hint="its directory must be on PYTHONPATH; the form is package.module:Class",
        ) from error


def _create(name: str, agent_class: object, options: AgentOptions) -> Agent:
    try:
        agent: Agent = agent_class(**options.extra)  # type: ignore[operator] # a TypeError otherwise
    except MiniSandboxError:
        raise
    except Exception as error:  # user code; it probably rejects an argument
        raise InvalidValue(
            f"the agent {name!r} cannot be created: {_describe(error)}", hint="check --agent-option NAME=VALUE"
        ) from error
    for attribute in ("name", "needs_model", "run"):
        if not hasattr(agent, attribute):
            raise InvalidValue(
                f"{name!r} is not an agent: it has no {attribute!r}", hint="docs/how-to/write-an-agent.md"
            )
    return agent


def _describe(error: Exception) -> str:
    """Return an error's message, with the class of errors that are unusual for imports and calls."""
    return str(error) if isinstance(error, ImportError | AttributeError | TypeError) else repr(error)
