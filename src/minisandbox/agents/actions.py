"""Actions that a model can take, independent of the format of its responses, and the schemas of the tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from minisandbox.errors import MiniSandboxError

BASH = "bash"
EDITOR = "str_replace_editor"
SUBMIT = "submit"
"""The names of the tools, equal to the names that published models were trained with."""

MAX_TEXT = 500_000
"""Maximum characters of a command, path or file text, so that the escaped text fits a sandbox's 8 MiB request."""


class FormatError(MiniSandboxError, ValueError):
    """A response has no action, or a malformed one. The message is for the model that wrote it."""

    exit_code = 47


@dataclass(frozen=True, slots=True)
class Bash:
    """Run a command.

    Attributes:
        command: shell code for bash.
    """

    command: str


@dataclass(frozen=True, slots=True)
class View:
    """Show a file with line numbers, or list a directory.

    Attributes:
        path: the file or directory.
        view_range: the first and last line, from 1; -1 is the last line of the file; None for all lines.
    """

    VERB: ClassVar = "view"
    path: str
    view_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Create:
    """Create a new file.

    Attributes:
        path: the file; missing directories are created.
        file_text: the file's content; a missing final newline is added.
    """

    VERB: ClassVar = "create"
    path: str
    file_text: str


@dataclass(frozen=True, slots=True)
class StrReplace:
    """Replace a text that occurs exactly once in a file.

    Attributes:
        path: the file.
        old_str: the text, exactly.
        new_str: the replacement.
    """

    VERB: ClassVar = "str_replace"
    path: str
    old_str: str
    new_str: str = ""


@dataclass(frozen=True, slots=True)
class Insert:
    """Insert lines into a file.

    Attributes:
        path: the file.
        insert_line: the line to insert after; 0 inserts before the first line.
        new_str: the lines; a missing final newline is added.
    """

    VERB: ClassVar = "insert"
    path: str
    insert_line: int
    new_str: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the changes of the repository and end the agent's loop."""


Edit = View | Create | StrReplace | Insert
Action = Bash | Edit | Submit
_EDITS = tuple(kind.VERB for kind in (View, Create, StrReplace, Insert))


def name_of(action: Action) -> str:
    """Return the name of an action's tool."""
    if isinstance(action, Bash):
        return BASH
    return SUBMIT if isinstance(action, Submit) else EDITOR


def arguments_of(action: Action) -> dict[str, object]:
    """Return the arguments of an action's tool call; :func:`action_of` is the inverse."""
    values = {field.name: getattr(action, field.name) for field in fields(action)}
    if isinstance(action, Bash | Submit):
        return values
    arguments = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {"command": action.VERB} | {name: value for name, value in arguments.items() if value is not None}


def action_of(name: str, arguments: Mapping[str, object]) -> Action:
    """Return the action of a tool call.

    Args:
        name: the name of the tool.
        arguments: the decoded arguments.

    Raises:
        FormatError: the tool is unknown, or an argument is unknown, missing or malformed.
    """
    if name not in _PARAMETERS:
        raise FormatError(f"There is no tool {name[:80]!r}. The tools are {BASH}, {EDITOR} and {SUBMIT}.")
    unknown_names = sorted(arguments.keys() - _PARAMETERS[name].keys())
    if unknown_names:
        raise FormatError(f"The tool {name} has no parameter {unknown_names[0][:80]!r}.")
    if name == SUBMIT:
        return Submit()
    if name == BASH:
        return Bash(_text(arguments, "command", name, blank=False))
    verb = _text(arguments, "command", name, blank=False)
    if verb not in _EDITS:
        raise FormatError(f"{verb[:80]!r} is no command for files. There are {', '.join(_EDITS)}.")
    return _edit(verb, arguments)


def _edit(verb: str, arguments: Mapping[str, object]) -> Edit:
    """Return the edit of an editor command; ignore arguments that belong to other editor commands."""
    path = _text(arguments, "path", verb, blank=False)
    match verb:
        case "view":
            return View(path, _range(arguments.get("view_range")))
        case "create":
            return Create(path, _text(arguments, "file_text", verb))
        case "insert":
            return Insert(path, _line(arguments.get("insert_line")), _text(arguments, "new_str", verb))
    old_text = _text(arguments, "old_str", verb)
    if not old_text:
        raise FormatError(f"{verb}: the text to replace is empty. Use insert to add lines.")
    return StrReplace(path, old_text, "" if arguments.get("new_str") is None else _text(arguments, "new_str", verb))


def _text(arguments: Mapping[str, object], name: str, verb: str, *, blank: bool = True) -> str:
    text = arguments.get(name)
    if text is None:
        raise FormatError(f"{verb}: the parameter {name!r} is missing.")
    if not isinstance(text, str):
        raise FormatError(f"{verb}: the parameter {name!r} is not a text.")
    if not blank and not text.strip():
        raise FormatError(f"{verb}: the parameter {name!r} is empty.")
    if len(text) > MAX_TEXT:
        raise FormatError(f"{verb}: the parameter {name!r} has more than {MAX_TEXT} characters. Do it in parts.")
    if "\0" in text:
        raise FormatError(f"{verb}: the parameter {name!r} has a NUL character in it.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can contain unpaired surrogates
        raise FormatError(f"{verb}: the parameter {name!r} has a character in it that UTF-8 cannot encode.") from None
    return text


def _range(argument: object) -> tuple[int, int] | None:
    if argument is None:
        return None
    if not isinstance(argument, list | tuple) or len(argument) != 2 or any(type(line) is not int for line in argument):
        raise FormatError("view: view_range is not two line numbers.")
    return argument[0], argument[1]


def _line(argument: object) -> int:
    if type(argument) is not int:
        raise FormatError("insert: insert_line is not a line number.")
    return argument


_STRING = "string"
_PARAMETERS: Mapping[str, Mapping[str, object]] = {
    BASH: {"command": {"type": _STRING, "description": "The command; it may have several lines."}},
    EDITOR: {
        "command": {"type": _STRING, "enum": list(_EDITS), "description": "What to do."},
        "path": {"type": _STRING, "description": "The file or directory."},
        "file_text": {"type": _STRING, "description": "For create: what the file holds."},
        "old_str": {"type": _STRING, "description": "For str_replace: the text to replace, with its indentation."},
        "new_str": {"type": _STRING, "description": "For str_replace and insert: the new text."},
        "insert_line": {
            "type": "integer",
            "description": "For insert: the line after which the text goes; 0: the top.",
        },
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 2,
            "description": "For view: the first and the last line, from 1; -1 is the last line of the file.",
        },
    },
    SUBMIT: {},
}
"""The JSON schema of each parameter, by tool."""


def _tool(name: str, description: str, *required: str) -> dict[str, object]:
    schema = {
        "type": "object", "properties": _PARAMETERS[name], "required": list(required), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: tuple[Mapping[str, object], ...] = (
    _tool(BASH, "Run a command in bash.", "command"),
    _tool(
        EDITOR,
        "View, create and edit files. view shows a file with line numbers, or lists a directory; create makes a new "
        "file; str_replace replaces a text that must be in the file exactly once; insert adds lines.",
        "command",
        "path",
    ),
    _tool(SUBMIT, "Submit the repository as it is now. This ends your work."),
)
"""The tools in the chat completions API's format."""
