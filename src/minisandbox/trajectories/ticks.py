"""The ticks style: a thought, then SWE-agent's command line in a block fenced by three backticks.

SWE-agent builds that line from a tool's signature (``sweagent/tools/commands.py``). For the editor, each missing
argument leaves a space. The writer reproduces these spaces; the reader does not need them.
"""

from __future__ import annotations

import json
import re
import shlex

from minisandbox.models import Message
from minisandbox.trajectories.styles import CannotSay, DecodedCall, ParsedAnswer

BASH = "bash"
EDITOR = "str_replace_editor"
SUBMIT = "submit"
_FENCE = re.compile(r"^```(\S*)[ \t]*$", re.MULTILINE)
_OPTIONS = ("file_text", "view_range", "old_str", "new_str", "insert_line")
"""The editor's options in the order of its signature, where they follow the command and the path."""


class TicksStyle:
    """The format of SWE-agent's ``thought_action`` parser: the last block is the action."""

    name = "ticks"
    answers_calls = False

    def read(self, message: Message) -> ParsedAnswer:
        """Return the action in the last block.

        Raises:
            CannotSay: there is no block, or it is empty.
        """
        text = message.content
        opened: list[re.Match[str]] = []
        block: tuple[re.Match[str], re.Match[str]] | None = None
        for fence in _FENCE.finditer(text):
            if opened and not fence[1]:
                start = opened.pop()
                block = block if opened else (start, fence)
            else:
                opened.append(fence)
        if block is None:
            raise CannotSay("the answer has no block between lines of backticks")
        first, last = block
        parts = (text[: first.start()], text[last.end() :])
        thought = "\n\n".join(part.strip() for part in parts if part.strip())
        return ParsedAnswer(thought, (_call(text[first.end() + 1 : last.start()].removesuffix("\n")),))

    def write(self, answer: ParsedAnswer) -> Message:
        """Return the message, in SWE-smith's layout.

        Raises:
            CannotSay: there are several calls, the tool is unknown, or the result would be parsed as another call.
        """
        if len(answer.calls) != 1:
            raise CannotSay(f"the ticks style allows one action per answer, not {len(answer.calls)}")
        action = command_line(answer.calls[0])
        if _FENCE.search(action):
            raise CannotSay("the action contains a line of backticks, which would end its block")
        return Message("assistant", f"{answer.thought}\n\n```\n{action}\n```")


def command_line(call: DecodedCall) -> str:
    """Return the command line that SWE-agent builds for a call.

    Args:
        call: a call of bash, the editor, or submit.

    Raises:
        CannotSay: the tool is unknown, or the line would be parsed as another call.
    """
    if call.name == BASH:
        line = str(call.arguments.get("command", ""))
    elif call.name == EDITOR:
        line = _of_editor(call)
    elif call.name == SUBMIT:
        line = SUBMIT
    else:
        raise CannotSay(f"the ticks style cannot express the tool {call.name[:80]!r}")
    again = _call(line)
    if (again.name, dict(again.arguments)) != (call.name, dict(call.arguments)):
        raise CannotSay(f"in the ticks style, this call of {call.name} would be read as another")
    return line


def _of_editor(call: DecodedCall) -> str:
    arguments = call.arguments
    unknown = sorted(set(arguments) - {"command", "path", *_OPTIONS})
    if unknown:
        raise CannotSay(f"{EDITOR} has no parameter {unknown[0][:80]!r}")
    tokens = [EDITOR, *(shlex.quote(str(arguments.get(name, ""))) for name in ("command", "path"))]
    tokens += [f"--{name} {_option(arguments[name])}" if name in arguments else "" for name in _OPTIONS]
    return " ".join(tokens).strip()


def _option(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return shlex.quote(value) if isinstance(value, str) else str(value)


def _call(action: str) -> DecodedCall:
    """Parse an action; anything but the editor and submit is a bash command."""
    if not action.strip():
        raise CannotSay("the block is empty")
    if action.strip() == SUBMIT:
        return DecodedCall(SUBMIT)
    if action.startswith(EDITOR):
        try:
            tokens = shlex.split(action)
        except ValueError:
            tokens = []
        arguments = _arguments(tokens[1:]) if tokens[:1] == [EDITOR] else None
        if arguments is not None:
            return DecodedCall(EDITOR, arguments)
    return DecodedCall(BASH, {"command": action})


def _arguments(tokens: list[str]) -> dict[str, object] | None:
    """Parse the editor's arguments; return None if they are not a plain editor call."""
    if len(tokens) < 2:
        return None
    arguments: dict[str, object] = {"command": tokens[0], "path": tokens[1]}
    remaining = tokens[2:]
    while remaining:
        name, remaining = remaining[0].removeprefix("--"), remaining[1:]
        count = 2 if name == "view_range" else 1
        if name not in _OPTIONS or name in arguments or len(remaining) < count:
            return None
        values, remaining = remaining[:count], remaining[count:]
        if name not in ("view_range", "insert_line"):
            arguments[name] = values[0]
            continue
        try:
            numbers = [int(json.loads(value)) for value in values]
        except (ValueError, TypeError, RecursionError):
            return None
        arguments[name] = numbers if name == "view_range" else numbers[0]
    return arguments
