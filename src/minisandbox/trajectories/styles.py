"""Styles: how answers in training data say what they do, in the three ways that SWE-smith's published sets have.

A style is read into thoughts and calls of tools, whatever the tools are called, and written from them. What SWE-smith's
own transformation writes, these write to the letter (``swesmith.train.traj_mgr.utils``, 0.0.9).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisandbox.errors import TrajectoryError
from minisandbox.models import Message, ToolCall

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SET_OFF = ("old_str", "new_str", "file_text")
_NUMBERS = ("insert_line", "view_range")


class CannotSay(TrajectoryError):
    """An answer without a call that can be read, or a call that a style has no words for."""

    exit_code = 35


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool.

    Attributes:
        name: the tool.
        arguments: its arguments, decoded.
        id: what the answer to it refers to, where the style has that.
    """

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer says.

    Attributes:
        thought: its text beside the calls.
        calls: the calls, in order; at least one.
    """

    thought: str
    calls: tuple[Call, ...]


class Style(Protocol):
    """A way to say calls.

    Attributes:
        name: what options and datasets call it.
        answers_calls: whether what came of a call is told in a message of the role ``tool``.
    """

    name: str
    answers_calls: bool

    def read(self, message: Message) -> Said:
        """Return what an answer says.

        Raises:
            CannotSay: there is no call in it, or one that cannot be understood.
        """
        ...

    def write(self, said: Said) -> Message:
        """Return an answer that says this; :meth:`read` reads the same calls from it.

        Raises:
            CannotSay: this style has no words for it.
        """
        ...


class ToolStyle:
    """Calls in OpenAI's layout, beside the text."""

    name = "tool"
    answers_calls = True

    def read(self, message: Message) -> Said:
        """Return the calls.

        Raises:
            CannotSay: there are none, or arguments are no JSON object.
        """
        if not message.tool_calls:
            raise CannotSay("the answer calls no tool")
        return Said(message.content, tuple(_decoded(call) for call in message.tool_calls))

    def write(self, said: Said) -> Message:
        """Return the message; calls without an id are numbered."""
        calls = (
            ToolCall(call.id or f"call_{number}", call.name, json.dumps(dict(call.arguments), ensure_ascii=False))
            for number, call in enumerate(said.calls)
        )
        return Message("assistant", said.thought, tuple(calls))


def _decoded(call: ToolCall) -> Call:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise CannotSay(f"the arguments of {call.name[:80]!r} are no JSON object")
    return Call(call.name, arguments, call.id)


class XmlStyle:
    """``<function=NAME>`` with ``<parameter=NAME>``: what SWE-agent-LM was trained on. Nothing in it is escaped."""

    name = "xml"
    answers_calls = False

    def read(self, message: Message) -> Said:
        """Return the functions.

        Raises:
            CannotSay: there is none, or one is not closed.
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
        return Said("\n\n".join(part.strip() for part in thoughts if part.strip()), tuple(calls))

    def write(self, said: Said) -> Message:
        """Return the message, in SWE-smith's layout.

        Raises:
            CannotSay: a value holds what ends values.
        """
        functions = "\n".join(_written(call) for call in said.calls)
        return Message("assistant", f"{said.thought}\n\n{functions}".strip())


def _function(text: str, start: int) -> tuple[Call, int]:
    """Read one function; returns it, and where it ends."""
    name, position = _name(text, start + len(_FUNCTION))
    arguments: dict[str, object] = {}
    while True:
        while text[position : position + 1].isspace():
            position += 1
        if text.startswith(_FUNCTION_END, position):
            return Call(name, arguments), position + len(_FUNCTION_END)
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
        raise CannotSay(f"{text[start - 10 : start + 20]!r} has no name with a > after it")
    return text[start:end], end + 1


def _value(key: str, text: str) -> object:
    if key in _NUMBERS:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise CannotSay(f"the parameter {key!r} is no number") from None
    return text


def _written(call: Call) -> str:
    lines = [f"{_FUNCTION}{call.name}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if _PARAMETER_END in text:
            raise CannotSay(f"the value of {key!r} holds {_PARAMETER_END}")
        set_off = key in _SET_OFF or text.startswith("\n") or text.endswith("\n")
        lines.append(
            f"{_PARAMETER}{key}>\n{text}\n{_PARAMETER_END}" if set_off else f"{_PARAMETER}{key}>{text}{_PARAMETER_END}"
        )
    return "\n".join([*lines, _FUNCTION_END])


def style_of(messages: Sequence[Message]) -> str:
    """Return the style that a conversation is in, by its answers; empty where none of them shows one.

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
