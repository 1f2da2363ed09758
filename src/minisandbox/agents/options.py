"""Define the options of agents once, for the command line, configuration files and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from minisandbox.agents.formats import FORMATS
from minisandbox.agents.session import AgentLimits
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
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise InvalidValue(f"{name} is {value!r}", hint=f"give {minimum} or more")

    def given(self) -> frozenset[str]:
        """Return the names of the options that differ from their defaults."""
        default = type(self)()
        return frozenset(one.name for one in fields(self) if getattr(self, one.name) != getattr(default, one.name))


T = TypeVar("T", bound="AgentOptions | AgentLimits")


def from_mapping(kind: type[T], values: Mapping[str, object]) -> T:
    """Create :class:`AgentOptions` or :class:`.AgentLimits` from a mapping of a configuration file.

    Raises:
        InvalidValue: a key is unknown, or a value is of the wrong type or out of range.
    """
    types = {one.name: str(one.type) for one in fields(kind)}
    read: dict[str, object] = {}
    for name, value in values.items():
        if name not in types:
            raise InvalidValue(f"agents have no option {name!r}", hint=f"they are {', '.join(types)}")
        type_name, optional, _ = types[name].partition(" | None")
        if isinstance(value, bool) or (not isinstance(value, _KINDS[type_name]) and not (optional and value is None)):
            raise InvalidValue(f"option {name!r} is {value!r}", hint=f"it is of type {types[name]}")
        read[name] = Path(value) if type_name == "Path" and isinstance(value, str) else value
    return kind(**read)  # type: ignore[arg-type] # checked against the annotations


def to_mapping(options: AgentOptions | AgentLimits) -> dict[str, object]:
    """Return options in JSON types for a run's configuration; :func:`from_mapping` is the inverse."""
    values = {one.name: getattr(options, one.name) for one in fields(options)}
    return {
        name: str(value) if isinstance(value, Path) else dict(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "Path": (str, Path),
    "Mapping[str, str]": Mapping,
}
