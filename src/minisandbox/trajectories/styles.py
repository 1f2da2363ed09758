"""Styles: the three ways in which responses of SWE-smith's published data sets express tool calls.

A style parses a response into a thought and tool calls, and writes a response from them. The output equals that of
SWE-smith's own transformation (``swesmith.train.traj_mgr.utils``, 0.0.9), byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisandbox.errors import TrajectoryError
from minisandbox.models import Message, ToolCall
from minisandbox.models.history import NO_JSON

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SET_OFF = ("old_str", "new_str", "file_text")
_NUMBERS = ("insert_line", "view_range")


class CannotSay(TrajectoryError):
    """The response has no valid tool call, or the style cannot express one."""

    exit_code = 35


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A tool call.

    Attributes:
        name: the tool's name.
        arguments: the decoded arguments.
        id: the id that its result refers to, if the style has ids.
    """

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A response, parsed.

    Attributes:
        thought: the text around the calls.
        calls: the calls, in order; at least one.
    """

    thought: str
    calls: tuple[DecodedCall, ...]


class Style(Protocol):
    """A way to express tool calls.

    Attributes:
        name: the style's name in options and data sets.
        answers_calls: whether the result of a call is a message with the role ``tool``.
    """

    name: str
    answers_calls: bool

    def read(self, message: Message) -> ParsedAnswer:
        """Parse a response.

        Raises:
            CannotSay: it has no call, or one that cannot be parsed.
        """
        ...

    def write(self, answer: ParsedAnswer) -> Message:
        """Write a response from which :meth:`read` reads the same calls.

        Raises:
            CannotSay: the style cannot express it.
        """
        ...


class ToolStyle:
    """Tool calls in OpenAI's format, separate from the text."""

    name = "tool"
    answers_calls = True

    def read(self, message: Message) -> ParsedAnswer:
        """Return the calls.

        Raises:
            CannotSay: there are no calls, or arguments are not a JSON object.
        """
        if not message.tool_calls:
            raise CannotSay("the answer calls no tool")
        return ParsedAnswer(message.content, tuple(_decoded(call) for call in message.tool_calls))

    def write(self, answer: ParsedAnswer) -> Message:
        """Return the message, numbering calls without an id."""
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
    if not isinstance(arguments, dict) or NO_JSON in arguments:  # malformed, or marked as malformed in our history
        raise CannotSay(f"the arguments of {call.name[:80]!r} are not a JSON object")
    return DecodedCall(call.name, arguments, call.id)


class XmlStyle:
    """``<function=NAME>`` with ``<parameter=NAME>``, unescaped: the format that SWE-agent-LM was trained on."""

    name = "xml"
    answers_calls = False

    def read(self, message: Message) -> ParsedAnswer:
        """Return the function calls.

        Raises:
            CannotSay: there is no function call, or one is not closed.
        """
        text, calls, thoughts = message.content, [], []
        position = 0
        while (start := text.find(_FUNCTION, position)) >= 0:
            thoughts.append(text[position:start])
            call, position = _function(text, start)
            calls.append(call)
        if not calls:
            raise CannotSay("the answer has no function call")
        thoughts.append(text[position:])
        return ParsedAnswer("\n\n".join(part.strip() for part in thoughts if part.strip()), tuple(calls))

    def write(self, answer: ParsedAnswer) -> Message:
        """Return the message, in SWE-smith's layout.

        Raises:
            CannotSay: a value contains the closing tag of parameters.
        """
        functions = "\n".join(_written(call) for call in answer.calls)
        return Message("assistant", f"{answer.thought}\n\n{functions}".strip())


def _function(text: str, start: int) -> tuple[DecodedCall, int]:
    """Parse one function; return it and the position of its end."""
    name, position = _name(text, start + len(_FUNCTION))
    arguments: dict[str, object] = {}
    while True:
        while text[position : position + 1].isspace():
            position += 1
        if text.startswith(_FUNCTION_END, position):
            return DecodedCall(name, arguments), position + len(_FUNCTION_END)
        if not text.startswith(_PARAMETER, position):
            raise CannotSay(f"the function {name[:80]!r} is not closed, or holds more than parameters")
        key, begin = _name(text, position + len(_PARAMETER))
        end = text.find(_PARAMETER_END, begin)
        if end < 0:
            raise CannotSay(f"the parameter {key[:80]!r} is not closed")
        arguments[key] = _value(key, text[begin:end].removeprefix("\n").removesuffix("\n"))
        position = end + len(_PARAMETER_END)


def _name(text: str, start: int) -> tuple[str, int]:
    end = text.find(">", start, start + 100)
    if end < 0:
        raise CannotSay(f"{text[start - 10 : start + 20]!r} has no name that ends in >")
    return text[start:end], end + 1


def _value(key: str, text: str) -> object:
    if key in _NUMBERS:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise CannotSay(f"the parameter {key!r} is not a number or a list of numbers") from None
    return text


def _written(call: DecodedCall) -> str:
    lines = [f"{_FUNCTION}{call.name}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if _PARAMETER_END in text:
            raise CannotSay(f"the value of {key!r} contains {_PARAMETER_END}, which the xml style cannot escape")
        set_off = key in _SET_OFF or text.startswith("\n") or text.endswith("\n")
        lines.append(
            f"{_PARAMETER}{key}>\n{text}\n{_PARAMETER_END}" if set_off else f"{_PARAMETER}{key}>{text}{_PARAMETER_END}"
        )
    return "\n".join([*lines, _FUNCTION_END])


def style_of(messages: Sequence[Message]) -> str:
    """Detect a conversation's style from its responses; empty if none of them shows one.

    Args:
        messages: the conversation.
    """
    answers = [message for message in messages if message.role == "assistant"]
    if any(message.tool_calls for message in answers):
        return "tool"
    text = "\n".join(message.content for message in answers)
    if _FUNCTION in text:
        return "xml"
    if any(f"```{word}\n" in text for word in ("bash", "edit", "submit")):
        return "text"
    return "ticks" if "```" in text else ""
