"""Define the options of agents once, for the command line, configuration files and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from minisandbox.agents.formats import FORMATS
from minisandbox.errors import InvalidValue

SHELLS = ("stateless", "stateful")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The options of this package's agents, and the arguments of an agent given by its import path.

    Attributes:
        action_format: the format of the model's actions: ``text``, ``tool`` or ``xml``.
        prompt: a file with the task's message, or a directory with prompts; None for this package's prompts.
        shell: ``stateless`` for a new shell per command, ``stateful`` for one shell for all commands.
        command_timeout: time limit of a command in seconds.
        observation_chars: maximum characters of a command's output that the model sees.
        format_errors: the number of responses in a row without a valid action after which a rollout ends.
        recording: the path of the recording for ``replay``.
        extra: keyword arguments of an agent given by its import path.
    """

    action_format: str = field(
        default="text", metadata={"choices": tuple(FORMATS), "help": "format of the model's actions"}
    )
    prompt: Path | None = field(
        default=None,
        metadata={"metavar": "PATH", "help": "a file with the task's message, or a directory with prompts"},
    )
    shell: str = field(
        default="stateless",
        metadata={"choices": SHELLS, "help": "whether commands share directory and variables"},
    )
    command_timeout: float = field(default=120.0, metadata={"metavar": "SECONDS", "help": "time limit of a command"})
    observation_chars: int = field(
        default=10_000, metadata={"metavar": "N", "help": "maximum characters of output that the model sees"}
    )
    format_errors: int = field(
        default=3, metadata={"metavar": "N", "help": "responses in a row without a valid action that end a rollout"}
    )
    recording: Path | None = field(
        default=None,
        metadata={"metavar": "PATH", "help": "recording for replay: a list of commands, a trajectory, or a run"},
    )
    extra: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"metavar": "NAME=VALUE", "help": "a keyword argument of an agent given by its import path"},
    )

    def __post_init__(self) -> None:
        for name, choices in (("action_format", tuple(FORMATS)), ("shell", SHELLS)):
            if getattr(self, name) not in choices:
                raise InvalidValue(f"{name} is {getattr(self, name)!r}", hint=f"use one of {', '.join(choices)}")
        if not 0 < self.command_timeout <= 86_400:
            raise InvalidValue(f"command_timeout is {self.command_timeout!r}", hint="give seconds, up to 86400")
        for name, minimum in (("observation_chars", 100), ("format_errors", 1)):
            count = getattr(self, name)
            if type(count) is not int or count < minimum:
                raise InvalidValue(f"{name} is {count!r}", hint=f"give {minimum} or more")

    def given(self) -> frozenset[str]:
        """Return the names of the options that differ from their defaults."""
        defaults = type(self)()
        names = (field.name for field in fields(self))
        return frozenset(name for name in names if getattr(self, name) != getattr(defaults, name))
