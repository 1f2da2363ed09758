"""The XML format of SWE-smith's models: one ``<function=NAME>`` with its ``<parameter=NAME>`` per response.

It only resembles XML: nothing is escaped, and a value ends at the first ``</parameter>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.agents.actions import BASH, SUBMIT, Action, FormatError, action_of, arguments_of, name_of
from minisandbox.agents.text_format import without_thought
from minisandbox.models import Message

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NUMBERS = ("insert_line", "view_range")


class XmlFormat:
    """Actions in the format of SWE-agent's ``xml_function_calling``."""

    name = "xml"
    reminder = f"Answer with exactly one function call: <function={BASH}>, or <function={SUBMIT}> when you are done."

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """No tools: the prompt describes them."""
        return ()

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the response's one action.

        Raises:
            FormatError: it has no action, several, or a malformed one.
        """
        text = without_thought(message.content)
        start = text.find(_FUNCTION)
        if start < 0:
            raise FormatError("Your answer has no function call.")
        name, position = _name(text, start + len(_FUNCTION))
        arguments: dict[str, object] = {}
        while (position := _next(text, position)) < len(text) and text.startswith(_PARAMETER, position):
            key, begin = _name(text, position + len(_PARAMETER))
            end = text.find(_PARAMETER_END, begin)
            if end < 0:
                raise FormatError(f"The parameter {key[:80]!r} is not closed by {_PARAMETER_END}.")
            arguments[key] = _value(key, text[begin:end])
            position = end + len(_PARAMETER_END)
        if not text.startswith(_FUNCTION_END, position):
            raise FormatError(f"The function call is not closed by {_FUNCTION_END}, or holds more than parameters.")
        if text.find(_FUNCTION, position) >= 0:
            raise FormatError("Your answer has several function calls; it must have one.")
        return (action_of(name, arguments),)

    def render(self, *actions: Action) -> Message:
        """Return a response with one call.

        Raises:
            FormatError: there is not exactly one action, or a value contains the end of a parameter.
        """
        if len(actions) != 1:
            raise FormatError(f"a response in this format has one action, not {len(actions)}")
        lines = [f"{_FUNCTION}{name_of(actions[0])}>"]
        for key, value in arguments_of(actions[0]).items():
            text = value if isinstance(value, str) else json.dumps(value)
            if _PARAMETER_END in text:
                raise FormatError(f"the value of {key!r} contains {_PARAMETER_END}")
            lines.append(f"{_PARAMETER}{key}>\n{text}\n{_PARAMETER_END}")
        return Message("assistant", "\n".join([*lines, _FUNCTION_END]))

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the user message that reports a result."""
        del message, number
        return Message("user", text)

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return the user message with a correction."""
        del message
        return (Message("user", text),)


def _name(text: str, start: int) -> tuple[str, int]:
    """Return a name up to ``>``, and the position after it."""
    end = text.find(">", start, start + 100)
    if end < 0:
        raise FormatError(f"{text[start - 10 : start + 20]!r} has no name with a > after it.")
    return text[start:end], end + 1


def _next(text: str, position: int) -> int:
    """Return the position after white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _value(key: str, text: str) -> object:
    """Return a value without the newlines around it; numbers are parsed as JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    if key not in _NUMBERS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(f"The parameter {key!r} is not a line number, or two as [1, 20].") from None
