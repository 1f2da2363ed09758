"""Load prompt files with placeholders in braces, and render them.

``{name}`` is a placeholder if the name is an identifier; ``{{name}}`` renders as ``{name}``. All other braces and
dollar signs are literal. Inserted values are not rendered again, so an issue may contain braces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue

PLACEHOLDERS: Mapping[str, str] = {
    "problem_statement": "the task's issue",
    "workdir": "the repository's directory",
    "actions": "how actions are written in this action format: the file actions-FORMAT.md",
    "shell": "whether commands share directory and variables",
    "command_timeout": "time limit of a command in seconds",
}
"""The placeholders of prompts, with descriptions of their values."""

_PLACEHOLDER = re.compile(r"\{(\{[A-Za-z_]\w*\})\}|\{([A-Za-z_]\w*)\}")
_PACKAGED = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders.

    Attributes:
        text: the text.
        source: the name of the text's file, for error messages.

    Raises:
        InvalidValue: the text has an unknown placeholder.
    """

    text: str
    source: str

    def __post_init__(self) -> None:
        for line_number, name in self._placeholders():
            if name not in PLACEHOLDERS:
                raise InvalidValue(
                    f"{self.source}:{line_number}: {{{name}}} is not a known placeholder",
                    hint=f"use {', '.join(PLACEHOLDERS)}; write {{{{{name}}}}} for the literal text",
                )

    def names(self) -> frozenset[str]:
        """Return the names of the template's placeholders."""
        return frozenset(name for _, name in self._placeholders())

    def _placeholders(self) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(self.text.split("\n"), start=1):
            yield from ((number, match[2]) for match in _PLACEHOLDER.finditer(line) if match[2])

    def render(self, values: Mapping[str, str]) -> str:
        """Return the text with its placeholders filled in."""
        return _PLACEHOLDER.sub(lambda match: match[1] or values[match[2]], self.text)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The first messages of a conversation.

    Attributes:
        system: the system message; if empty, no system message is sent.
        task: the user's first message.
        actions: the value of ``{actions}`` in both.
    """

    system: Template
    task: Template
    actions: Template

    @classmethod
    def load(cls, action_format: str, path: Path | None = None) -> Prompts:
        """Load the prompts.

        Args:
            action_format: the action format's name.
            path: a file with the user's first message; or a directory with any of ``system.md``, ``task.md`` and
                ``actions-FORMAT.md``. This package's files replace missing files.

        Raises:
            InvalidValue: a file cannot be read or has unknown placeholders, or no file contains the issue.
        """
        names = ("system.md", "task.md", f"actions-{action_format}.md")
        custom_paths: dict[str, Path] = {}
        if path is not None and path.is_dir():
            custom_paths = {name: path / name for name in names if (path / name).exists()}
            if not custom_paths:
                raise InvalidValue(f"{path} has no prompt", hint=f"it may have {', '.join(names)}")
        elif path is not None:
            custom_paths = {"task.md": path}
        prompts = cls(*(_read(custom_paths.get(name, _PACKAGED / name)) for name in names))
        prompts._check()
        return prompts

    def render(self, values: Mapping[str, str]) -> tuple[str, str]:
        """Return the system message and the user's message.

        Args:
            values: the values of all placeholders except ``actions``.
        """
        all_values = {**values, "actions": self.actions.render({**values, "actions": ""}).rstrip("\n")}
        return self.system.render(all_values).rstrip("\n"), self.task.render(all_values).rstrip("\n")

    def _check(self) -> None:
        if "problem_statement" not in self.system.names() | self.task.names():
            raise InvalidValue(
                f"{self.task.source} does not contain the issue", hint="put {problem_statement} where it belongs"
            )


def _read(path: Path) -> Template:
    try:
        return Template(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InvalidValue(f"the prompt {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidValue(f"the prompt {path} is not UTF-8", hint="save it as UTF-8") from error
