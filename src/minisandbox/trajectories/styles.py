"""Convert conversations between the styles in which SWE-smith's published data sets express tool calls.

A style parses a response into a thought and tool calls, and writes a response from a thought and tool calls. The output
equals that of SWE-smith's own transformation (``swesmith.train.traj_mgr.utils``, 0.0.9), byte for byte.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from minisandbox.agents.actions import BASH, EDITOR, SUBMIT, FormatError
from minisandbox.agents.formats import FUNCTION, read_function, write_function
from minisandbox.errors import TrajectoryError
from minisandbox.models import Message, ToolCall
from minisandbox.models.dialect import NO_JSON
from minisandbox.trajectories.example import Example


class CannotSay(TrajectoryError):
    """A response contains no valid tool call, or a style cannot express the tool call."""

    exit_code = 35


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A tool call with decoded arguments.

    Attributes:
        name: the tool's name.
        arguments: the decoded arguments.
        id: the id by which the result refers to the call; "" if the style has no ids.
    """

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The thought and the tool calls of a response.

    Attributes:
        thought: the text around the calls.
        calls: the tool calls, in order; at least one.
    """

    thought: str
    calls: tuple[DecodedCall, ...]


class Style(Protocol):
    """A textual or structured form in which responses express tool calls.

    Attributes:
        name: the style's name in options and data sets.
        answers_calls: whether the result of a call is a message with the role ``tool``.
    """

    name: str
    answers_calls: bool

    def read(self, message: Message) -> ParsedAnswer:
        """Parse a response.

        Raises:
            CannotSay: the response has no call, or a malformed call.
        """
        ...

    def write(self, answer: ParsedAnswer) -> Message:
        """Write a response from which :meth:`read` parses the same calls.

        Raises:
            CannotSay: the style cannot express the response.
        """
        ...


class ToolStyle:
    """Tool calls in OpenAI's format, in a separate field of the message."""

    name = "tool"
    answers_calls = True

    def read(self, message: Message) -> ParsedAnswer:
        """Decode the message's tool calls.

        Raises:
            CannotSay: there are no calls, or the arguments of a call are not a JSON object.
        """
        if not message.tool_calls:
            raise CannotSay("the answer calls no tool")
        return ParsedAnswer(message.content, tuple(_decoded(call) for call in message.tool_calls))

    def write(self, answer: ParsedAnswer) -> Message:
        """Write a message with tool calls; calls without an id are numbered."""
        calls = (
            ToolCall(call.id or f"call_{number}", call.name, json.dumps(dict(call.arguments), ensure_ascii=False))
            for number, call in enumerate(answer.calls)
        )
        return Message("assistant", answer.thought, tuple(calls))


def _decoded(call: ToolCall) -> DecodedCall:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or NO_JSON in arguments:  # NO_JSON marks arguments that were malformed
        raise CannotSay(f"the arguments of {call.name[:80]!r} are not a JSON object")
    return DecodedCall(call.name, arguments, call.id)


class XmlStyle:
    """Tool calls as unescaped ``<function=NAME>`` and ``<parameter=NAME>`` tags, as in SWE-agent-LM's training data."""

    name = "xml"
    answers_calls = False

    def read(self, message: Message) -> ParsedAnswer:
        """Parse the function calls in the text.

        Raises:
            CannotSay: there is no function call, or a function call is malformed.
        """
        text, calls, thoughts = message.content, [], []
        position = 0
        while (start := text.find(FUNCTION, position)) >= 0:
            thoughts.append(text[position:start])
            try:
                name, arguments, position = read_function(text, start)
            except FormatError as error:
                raise CannotSay(error.what) from None
            calls.append(DecodedCall(name, arguments))
        if not calls:
            raise CannotSay("the answer has no function call")
        thoughts.append(text[position:])
        return ParsedAnswer("\n\n".join(part.strip() for part in thoughts if part.strip()), tuple(calls))

    def write(self, answer: ParsedAnswer) -> Message:
        """Write the message in SWE-smith's layout.

        Raises:
            CannotSay: a value contains the closing tag of parameters.
        """
        try:
            functions = "\n".join(write_function(call.name, call.arguments) for call in answer.calls)
        except FormatError as error:
            raise CannotSay(error.what) from None
        return Message("assistant", f"{answer.thought}\n\n{functions}".strip())


def style_of(messages: Sequence[Message]) -> str:
    """Detect a conversation's style from its responses; return "" if no response has an action.

    Args:
        messages: the conversation.
    """
    answers = [message for message in messages if message.role == "assistant"]
    if any(message.tool_calls for message in answers):
        return "tool"
    text = "\n".join(message.content for message in answers)
    if FUNCTION in text:
        return "xml"
    if any(f"```{word}\n" in text for word in ("bash", "edit", "submit")):
        return "text"
    return "ticks" if "```" in text else ""


_FENCE = re.compile(r"^```(\S*)[ \t]*$", re.MULTILINE)
_OPTIONS = ("file_text", "view_range", "old_str", "new_str", "insert_line")
"""Options of SWE-agent's editor, in the order of its command line, where they follow the command and the path."""


class TicksStyle:
    """The format of SWE-agent's ``thought_action`` parser: the last block fenced by three backticks is the action.

    The block contains a command line, which SWE-agent builds from a tool's signature (``sweagent/tools/commands.py``).
    In the editor's command line, each omitted option leaves an extra space. :meth:`write` reproduces these spaces, and
    :meth:`read` ignores them.
    """

    name = "ticks"
    answers_calls = False

    def read(self, message: Message) -> ParsedAnswer:
        """Parse the action in the last block.

        Raises:
            CannotSay: there is no block, or the block is empty.
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
        """Write the message in SWE-smith's layout.

        Raises:
            CannotSay: there are several calls, the tool is unknown, or :meth:`read` would return a different call.
        """
        if len(answer.calls) != 1:
            raise CannotSay(f"the ticks style allows one action per answer, not {len(answer.calls)}")
        action = command_line(answer.calls[0])
        if _FENCE.search(action):
            raise CannotSay("the action contains a line of backticks, which would end its block")
        return Message("assistant", f"{answer.thought}\n\n```\n{action}\n```")


def command_line(call: DecodedCall) -> str:
    """Return the command line that SWE-agent builds for a tool call.

    Args:
        call: a call of bash, the editor, or submit.

    Raises:
        CannotSay: the tool is unknown, or the command line would be parsed as a different call.
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
    """Parse an action. Text that is neither an editor call nor ``submit`` is a bash command."""
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
    """Parse the editor's arguments; return None if they do not match the editor's signature."""
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


STYLES: Mapping[str, Style] = {style.name: style for style in (ToolStyle(), XmlStyle(), TicksStyle())}
"""SWE-smith's three styles, by name."""

Rewrite = Callable[[str, str, str], str]
"""A function that rewrites a prompt for one style (second argument) to describe another style (third argument)."""

LEFT = "answers left unchanged because they hold no action"
STALE = "prompts that may describe another style"


class Converter:
    """Convert examples to one style. Messages of an example in that style stay unchanged, except for the system prompt.

    Args:
        style: the name of the target style.
        styles: all known styles, by name.
        system: replaces every system prompt; None keeps the system prompts.
        rewrite: adapts prompts when the style changes; None keeps the prompts.
        tools: the model's tools, for examples that list no tools and are converted to tool calls.

    Attributes:
        notes: counts of unconverted responses and of prompts that may be outdated, for the report.
    """

    def __init__(
        self,
        style: str,
        *,
        styles: Mapping[str, Style] = STYLES,
        system: str | None = None,
        rewrite: Rewrite | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._to = styles[style]
        self._styles = styles
        self._system = system
        self._rewrite = rewrite
        self._tools = tuple(tools)
        self.notes: Counter[str] = Counter()

    def convert(self, example: Example) -> Example:
        """Return an example in the target style.

        Raises:
            CannotSay: the example's own style is unknown, or the target style cannot express a call.
        """
        messages = example.messages
        if example.style != self._to.name:
            if example.style not in self._styles:
                raise CannotSay(f"{example.traj_id}: its style is not known", hint="name it: --style STYLE")
            messages = tuple(self._messages(messages, self._styles[example.style]))
            messages = self._prompts(messages, example.style)
        if self._system is not None:
            dialogue = messages[1:] if messages and messages[0].role == "system" else messages
            messages = (Message("system", self._system), *dialogue)
        tools = (example.tools or self._tools) if self._to.answers_calls else ()
        return replace(example, messages=messages, style=self._to.name, tools=tools)

    def _messages(self, messages: Sequence[Message], source: Style) -> Iterator[Message]:
        calls: tuple[str, ...] = ()
        number = 0
        for from_model, group in itertools.groupby(messages, lambda message: message.role == "assistant"):
            if not from_model:
                yield from self._results(list(group), calls)
                continue
            for message in group:
                answer = self._read(message, source)
                if answer is None:
                    calls = ()
                    yield Message("assistant", message.content, reasoning=message.reasoning)
                    continue
                named = tuple(replace(call, id=f"call_{number + index}") for index, call in enumerate(answer.calls))
                number += len(named)
                calls = tuple(call.id for call in named)
                yield replace(self._to.write(ParsedAnswer(answer.thought, named)), reasoning=message.reasoning)

    def _read(self, message: Message, source: Style) -> ParsedAnswer | None:
        try:
            return source.read(message)
        except CannotSay:
            self.notes[LEFT] += 1
            return None

    def _results(self, messages: list[Message], calls: tuple[str, ...]) -> Iterator[Message]:
        """Yield the messages between two responses, with the roles that the target style uses for results."""
        if not self._to.answers_calls or not calls:
            yield from (Message("user", message.content) if message.role == "tool" else message for message in messages)
            return
        if len(calls) > len(messages):
            raise CannotSay(f"{len(calls)} calls have only {len(messages)} results")
        for index, message in enumerate(messages):
            yield Message("tool", message.content, tool_call_id=calls[index]) if index < len(calls) else message

    def _prompts(self, messages: tuple[Message, ...], source: str) -> tuple[Message, ...]:
        """Return all messages, with the prompts before the first response rewritten for the target style."""
        opening = tuple(itertools.takewhile(lambda message: message.role != "assistant", messages))
        rewrite = self._rewrite or (lambda text, _from, _to: text)
        adapted = tuple(
            replace(message, content=rewrite(message.content, source, self._to.name)) for message in opening
        )
        if adapted == opening and self._system is None:
            self.notes[STALE] += 1
        return adapted + messages[len(opening) :]
