"""The section ``minisandbox`` of a SkyRL configuration, and the configurations that come with the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from minisandbox.agents import FORMATS
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.train.options import option, positive, reward_or_none

SECTION = "minisandbox"
"""The section's name."""
_FILE = f"{SECTION}.config"
"""The key that names a file of keys and values; those of the command line come after it."""
_ENTRY = "trainer.override_entrypoint"


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """How rollouts are done. How answers are drawn is SkyRL's own ``generator.sampling_params``."""

    out: str = option("runs/skyrl", help="the directory for the whole configuration, and for a run directory of each "
                      "step's rollouts")  # fmt: skip
    agent: str = option("bash", help="the agent, by name or as package.module:Class")
    action_format: str = option("text", help="how the bash agent's model says its actions", choices=tuple(FORMATS))
    prompt: str | None = option(None, help="the bash agent's: a file, or a directory of prompts")
    steps: int = option(150, help="answers of the model at most")
    context: int | None = option(None, help="tokens of a prompt and its answer at most; the engine's bound without")
    seconds: float = option(300.0, help="seconds of the agent's loop; what it has done until then is graded")
    deadline: float = option(900.0, help="seconds after which an agent is cut off, whatever it waits for; it is graded")
    step_deadline: float = option(7200.0, help="seconds of all rollouts of a step; what has not ended a minute later "
                                  "has no reward")  # fmt: skip
    unconfirmed_reward: float | None = option(None, help="reward of a submission whose pass could not be confirmed; "
                                              "null: it has none, and is left out")  # fmt: skip
    tries: int = option(3, help="tries of a rollout that fails on our side")
    workers: int = option(128, help="sandboxes with an agent at once; with a cluster, what its nodes offer counts")
    cluster: str | None = option(None, help="auto: rollouts are done by all nodes of SkyRL's Ray cluster that offer "
                                 "sandboxes; without, by the node of its training loop")  # fmt: skip
    builds: int = option(0, help="images that are built at once; 0: one for each CPU")
    starts: int = option(0, help="sandboxes that are made at once; 0: two for each CPU")
    gradings: int = option(0, help="submissions that are graded at once; 0: one for each CPU")
    model_timeout: float = option(600.0, help="seconds that one answer of the engines may take")
    repo_mirrors: str | None = option(None, help="a directory of git repositories to take commits from first")

    def __post_init__(self) -> None:
        positive(
            steps=self.steps, seconds=self.seconds, deadline=self.deadline, step_deadline=self.step_deadline,
            tries=self.tries, workers=self.workers, model_timeout=self.model_timeout,
        )  # fmt: skip
        reward_or_none("unconfirmed_reward", self.unconfirmed_reward)
        if min(self.builds, self.starts, self.gradings) < 0:
            raise InvalidValue("builds, starts and gradings are numbers", hint="give 0 or more")


def packaged() -> tuple[str, ...]:
    """Return the names of the configurations that come with the package."""
    names = (one.name for one in (resources.files(__package__) / "configs").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_words(words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Divide a command line: what a file says that it names, by keys with dots, and the words that come after that.

    Args:
        words: of SkyRL's command line.

    Raises:
        NotFound: there is no such file.
        InvalidValue: it is no YAML, or no table.
    """
    found: dict[str, object] = {}
    rest = []
    for word in words:
        key, _, value = word.partition("=")
        if key == _FILE:
            found |= dict(_flat(_table(value)))
        elif key != _ENTRY:  # SkyRL's own: it is why we are asked
            rest.append(word)
    return found, rest


def _table(name: str) -> Mapping[str, object]:
    path = Path(name)
    if not path.is_file() and name not in packaged():
        raise NotFound(f"{name}: no such file", hint=f"a YAML file, or one of the package: {', '.join(packaged())}")
    file = path if path.is_file() else resources.files(__package__) / "configs" / f"{name}.yaml"
    try:
        table = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InvalidValue(f"{name} is no YAML", reason=str(error)) from error
    if not isinstance(table, dict):
        raise InvalidValue(f"{name} is no table", reason="a configuration is keys with values")
    return table


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
