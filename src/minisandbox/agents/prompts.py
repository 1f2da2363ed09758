"""Prompts: files with placeholders in braces, and how they are filled in.

``{name}`` is a placeholder if the name is one; ``{{name}}`` stands for ``{name}``. All other braces, and dollar signs,
mean themselves. What is filled in is never looked at again, so that an issue may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue

PLACEHOLDERS: Mapping[str, str] = {
    "problem_statement": "the issue, as the task has it",
    "workdir": "the repository's directory",
    "actions": "how actions are written in this action format: the file actions-FORMAT.md",
    "shell": "whether directory and variables last from one command to the next",
    "command_timeout": "seconds that a command may take",
}
"""What a prompt may hold, and what is put in its place."""

_PLACEHOLDER = re.compile(r"\{(\{[A-Za-z_]\w*\})\}|\{([A-Za-z_]\w*)\}")
_HERE = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders.

    Attributes:
        text: the text.
        source: where it comes from; what errors call it.

    Raises:
        InvalidValue: it holds a placeholder that nobody knows.
    """

    text: str
    source: str

    def __post_init__(self) -> None:
        for line, name in self._placeholders():
            if name not in PLACEHOLDERS:
                raise InvalidValue(
                    f"{self.source}:{line}: {{{name}}} is no placeholder of prompts",
                    hint=f"known are {', '.join(PLACEHOLDERS)}; write {{{{{name}}}}} for the text itself",
                )

    def names(self) -> frozenset[str]:
        """Return the placeholders in it."""
        return frozenset(name for _, name in self._placeholders())

    def _placeholders(self) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(self.text.split("\n"), start=1):
            yield from ((number, match[2]) for match in _PLACEHOLDER.finditer(line) if match[2])

    def render(self, values: Mapping[str, str]) -> str:
        """Return the text with its placeholders filled in."""
        return _PLACEHOLDER.sub(lambda match: match[1] or values[match[2]], self.text)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What an agent begins a conversation with.

    Attributes:
        system: the system's message; empty for none.
        task: the user's first message.
        actions: what fills in ``{actions}`` in both.
    """

    system: Template
    task: Template
    actions: Template

    @classmethod
    def load(cls, action_format: str, path: Path | None = None) -> Prompts:
        """Read them.

        Args:
            action_format: the action format's name.
            path: a file, for the user's first message; or a directory with any of ``system.md``, ``task.md`` and
                ``actions-FORMAT.md``. What it lacks is the package's own.

        Raises:
            InvalidValue: it cannot be read, has unknown placeholders, or never says what the issue is.
        """
        names = ("system.md", "task.md", f"actions-{action_format}.md")
        own: dict[str, Path] = {}
        if path is not None and path.is_dir():
            own = {name: path / name for name in names if (path / name).exists()}
            if not own:
                raise InvalidValue(f"{path} holds no prompt", hint=f"it may hold {', '.join(names)}")
        elif path is not None:
            own = {"task.md": path}
        prompts = cls(*(_read(own.get(name, _HERE / name)) for name in names))
        prompts._check()
        return prompts

    def render(self, values: Mapping[str, str]) -> tuple[str, str]:
        """Return the system's and the user's message.

        Args:
            values: what fills in every placeholder but ``actions``.
        """
        whole = {**values, "actions": self.actions.render({**values, "actions": ""}).rstrip("\n")}
        return self.system.render(whole).rstrip("\n"), self.task.render(whole).rstrip("\n")

    def _check(self) -> None:
        if "problem_statement" not in self.system.names() | self.task.names():
            raise InvalidValue(
                f"{self.task.source} does not say what the issue is", hint="put {problem_statement} where it belongs"
            )


def _read(path: Path) -> Template:
    try:
        return Template(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InvalidValue(f"the prompt {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidValue(f"the prompt {path} is not UTF-8", hint="save it as UTF-8") from error
