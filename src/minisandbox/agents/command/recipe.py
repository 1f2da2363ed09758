"""Read the recipes of command-line agents: what to install, the configuration, and the command."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Self

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.plugins import load_plugin, plugin_names
from minisandbox.spec import HostBase, InstallAgent, Recipe, Run

VERSION = 1
"""The version of the format of recipes."""
APIS = ("chat", "messages", "responses")
_STEP_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class AgentRecipe:
    """A command-line agent, as data.

    In ``command``, in the values of ``environment`` and in the contents of ``files``, these words in braces are
    replaced: ``{message}`` the task's message, ``{message_file}`` the path of a file that contains the message,
    ``{base_url}`` the model's address with ``/v1``, ``{server_url}`` the address without ``/v1``, ``{key}`` the model's
    key, ``{model}`` its name, ``{workdir}`` the workspace, and ``{agent}`` the directory of the agent's programs.

    Attributes:
        name: the agent's name.
        version: the agent's version.
        command: the command and its arguments.
        api: the API that the agent speaks: ``chat``, ``messages`` or ``responses``.
        python: the requirements to install, with pinned versions.
        npm: the npm packages to install, with versions.
        setup: shell commands that finish the installation, without network.
        environment: the variables of the command.
        files: the contents of configuration files by path; ``~`` is the home directory.
        stdin: the standard input: ``null`` for ``/dev/null``, ``message`` for the task's message.
        prompt: the text around ``{message}``, if the agent needs more than the task's problem statement.
        model: the model's name for the agent, if the agent accepts only certain names.
        idle: seconds without a request to the model after which the agent is stopped.
    """

    name: str
    version: str
    command: tuple[str, ...]
    api: str = "chat"
    python: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = "null"
    prompt: str = "{message}"
    model: str = ""
    idle: float = 1800.0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidValue: a field is malformed.
        """
        for name, choices in (("api", APIS), ("stdin", ("null", "message"))):
            if getattr(self, name) not in choices:
                raise InvalidValue(f"{name} is {getattr(self, name)!r}", hint=f"use one of {', '.join(choices)}")
        if not self.command:
            raise InvalidValue("command is empty", hint="give a program and its arguments")
        if not self.idle > 0:
            raise InvalidValue(f"idle is {self.idle!r}", hint="give a number of seconds above 0")
        templates = (*self.command, *self.environment.values(), *self.files.values())
        if self.stdin == "null" and not any("{message" in text for text in templates):
            raise InvalidValue(
                "no part has the task's message", hint="add {message} to the command, or stdin = 'message'"
            )
        self.image()  # checks the packages

    @classmethod
    def of(cls, table: object, subject: str) -> Self:
        """Create a recipe from the content of a file.

        Args:
            table: the decoded TOML or YAML.
            subject: the name of the file, for errors.

        Raises:
            InvalidValue: a field is missing, unknown or malformed.
        """
        if not isinstance(table, Mapping) or table.get("format") != VERSION:
            raise InvalidValue(f"{subject} is not a recipe of an agent", hint=f"it begins with format = {VERSION}")
        values: dict[str, object] = {}
        kinds = {attribute.name: str(attribute.type) for attribute in fields(cls)}
        for name, value in table.items():
            if name == "format":
                continue
            kind = kinds.get(name)
            if kind is None:
                raise InvalidValue(f"{subject}: unknown field {name!r}", hint=f"the fields are {', '.join(kinds)}")
            is_strings = kind.startswith("tuple") and isinstance(value, list) and all(isinstance(x, str) for x in value)
            is_table = kind.startswith("Mapping") and isinstance(value, Mapping) and all(map(_is_text, value.items()))
            is_number = kind == "float" and isinstance(value, int | float)
            if not (is_strings or is_table or is_number or (kind == "str" and isinstance(value, str))):
                raise InvalidValue(f"{subject}: {name} is {value!r}", hint=f"the field is of the type {kind}")
            values[name] = tuple(value) if isinstance(value, list) else value
        missing = [name for name in ("name", "version", "command") if name not in values]
        if missing:
            raise InvalidValue(f"{subject}: {missing[0]} is missing")
        try:
            return cls(**values)  # type: ignore[arg-type] # checked above
        except InvalidValue as error:
            raise error.about(subject) from None

    @property
    def title(self) -> str:
        """The agent's name and version."""
        return f"{self.name} {self.version}"

    def image(self) -> Recipe | None:
        """Return the recipe of the image with the agent's program; None if nothing is installed."""
        if not (self.python or self.npm or self.setup):
            return None
        install = InstallAgent(self.title, self.python, self.npm)
        setup = tuple(Run(("bash", "-ec", command)) for command in self.setup)
        return Recipe(HostBase(), (install, *setup), step_timeout=_STEP_TIMEOUT)


def _is_text(pair: tuple[object, object]) -> bool:
    return all(isinstance(part, str) for part in pair)


def recipe_names() -> tuple[str, ...]:
    """Return the names of this package's recipes and of those of other distributions."""
    return (*bundled_recipes(), *plugin_names("recipes", bundled_recipes()))


def load_recipe(name: str) -> AgentRecipe:
    """Return a recipe.

    Args:
        name: the name of a recipe of this package or of another distribution; or the path of a TOML or YAML file.

    Raises:
        NotFound: there is no such recipe.
        InvalidValue: the file is malformed.
        PackageError: the plug-in cannot be loaded, or is not a recipe.
    """
    if name in bundled_recipes():
        text = (resources.files(__package__) / "recipes" / f"{name}.toml").read_text("utf-8")
        return AgentRecipe.of(tomllib.loads(text), f"{name}.toml")
    path = Path(name)
    if path.suffix in (".toml", ".yaml", ".yml"):
        return _read(path)
    plugin = load_plugin("recipes", name, bundled_recipes())
    if isinstance(plugin, AgentRecipe):
        return plugin
    if plugin is not None:
        raise InvalidValue(
            f"the recipe {name!r} of another distribution is {type(plugin)!r}", hint="give an AgentRecipe"
        )
    raise NotFound(f"there is no recipe {name!r}", hint=f"use {', '.join(recipe_names())}, or a .toml or .yaml file")


def _read(path: Path) -> AgentRecipe:
    import yaml  # noqa: PLC0415 - most recipes are TOML

    try:
        text = path.read_text("utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", hint="give the path of a recipe") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error
    return AgentRecipe.of(table, str(path))


def bundled_recipes() -> tuple[str, ...]:
    """Return the names of this package's recipes."""
    folder = resources.files(__package__) / "recipes"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir()))
