"""Answers as engines take them back, in the conversation that the next request repeats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from minisandbox.models.protocol import Message, ToolCall

NO_JSON = "INVALID_JSON"
"""In a history: the parameter that holds a call's arguments which are no JSON object."""

_ODD = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64


def taken_back(message: Message, tools: Sequence[Mapping[str, object]] = ()) -> Message:
    """Return an answer as it can stand in a history: its calls name tools properly, and have objects as arguments.

    Models write calls that are none, and engines hand them on. Sent back as they came, they are refused with every
    further request: vLLM reads the arguments of earlier calls as JSON before it fills in the chat template, and
    OpenAI looks at the names. What was written stays, as the text of one parameter.

    Args:
        message: the answer.
        tools: what it was offered; names of these are proper.
    """
    if not message.tool_calls:
        return message
    known = {function.get("name") for tool in tools if isinstance(function := tool.get("function"), Mapping)}
    return replace(message, tool_calls=tuple(_taken_back(call, call.name in known) for call in message.tool_calls))


def _taken_back(call: ToolCall, known: bool) -> ToolCall:
    name = call.name if known else _ODD.sub("_", call.name)[:_LONGEST_NAME] or "_"
    return ToolCall(call.id, name, _object(call.arguments))


def _object(arguments: str) -> str:
    """Return the text of a JSON object: the arguments, where they are one."""
    try:
        value = json.loads(arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    return arguments or "{}" if isinstance(value, dict) else json.dumps({NO_JSON: arguments})


def _refuse(name: str) -> object:
    """Refuse NaN and the infinities: Python's reader takes them, and no other."""
    raise ValueError(name)
