"""Read the section ``minisandbox`` of a SkyRL configuration, and the packaged configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from minisandbox.agents import FORMATS
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.grade import GradingOptions
from minisandbox.train.options import Options, option

SECTION = "minisandbox"
"""The name of the section in SkyRL's configuration."""
_FILE = f"{SECTION}.config"
"""The key that names a configuration file; other arguments override the options in the file."""
_ENTRY = "trainer.override_entrypoint"


@dataclass(frozen=True, slots=True)
class SandboxOptions(Options):
    """The options of rollouts, except for sampling, which SkyRL's ``generator.sampling_params`` sets."""

    out: str = option("runs/skyrl", help="directory for the whole configuration, and for one run directory per step")
    agent: str = option("bash", help="the agent, by name or as package.module:Class")
    action_format: str = option("text", help="the bash agent's action format", choices=tuple(FORMATS))
    prompt: str | None = option(None, help="a file or directory with the bash agent's prompts")
    steps: int = option(150, help="most answers of the model")
    context: int | None = option(None, help="most tokens of a prompt with its answer; null: the engine's own limit")
    seconds: float = option(300.0, help="seconds of the agent's loop; its changes so far are graded")
    deadline: float = option(900.0, help="seconds after which an agent is stopped, whatever it waits for, and graded")
    step_deadline: float = option(7200.0, help="seconds for all rollouts of a step; one that ends over a minute later "
                                  "has no reward")  # fmt: skip
    unconfirmed_reward: float | None = option(None, least=0, most=1, help="reward of a submission whose pass could not "
                                              "be confirmed; null: no reward, and the rollout is left out")  # fmt: skip
    grading: GradingOptions = GradingOptions()  # noqa: RUF009 - the dataclass is frozen
    tries: int = option(3, help="most tries of a rollout, repeated after infrastructure errors")
    workers: int = option(128, help="concurrent agents, each in a sandbox; with a cluster, its nodes' offers count")
    cluster: str | None = option(None, help="auto: all nodes of SkyRL's Ray cluster that offer sandboxes run rollouts; "
                                 "null: the node of the training loop does")  # fmt: skip
    builds: int = option(0, least=0, help="concurrent image builds; 0: one per CPU")
    starts: int = option(0, least=0, help="concurrent creations of sandboxes; 0: two per CPU")
    gradings: int = option(0, least=0, help="concurrent gradings; 0: one per CPU")
    model_timeout: float = option(600.0, help="seconds per answer of the engines")
    repo_mirrors: str | None = option(None, help="directory of git repositories to take commits from first")


def packaged() -> tuple[str, ...]:
    """Return the names of the packaged configurations."""
    names = (file.name for file in (resources.files(__package__) / "configs").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_arguments(arguments: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Read the configuration file that a command line names; return its options by dotted key, and the other arguments.

    Args:
        arguments: the arguments of SkyRL's command line.

    Raises:
        NotFound: there is no such file.
        InvalidValue: the file is not valid YAML, or not a mapping.
    """
    options: dict[str, object] = {}
    remaining = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == _FILE:
            options |= dict(_flat(_table(value)))
        elif key != _ENTRY:  # drop SkyRL's option that selected this module
            remaining.append(argument)
    return options, remaining


def _table(name: str) -> Mapping[str, object]:
    path = Path(name)
    if not path.is_file() and name not in packaged():
        raise NotFound(f"{name}: no such file", hint=f"give a YAML file, or a packaged one: {', '.join(packaged())}")
    file = path if path.is_file() else resources.files(__package__) / "configs" / f"{name}.yaml"
    try:
        table = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InvalidValue(f"{name} is not valid YAML", reason=str(error)) from error
    if not isinstance(table, dict):
        raise InvalidValue(f"{name} is not a mapping", reason="a configuration maps keys to values")
    return table


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
