"""Responses as engines accept them back, in the history of the next request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from minisandbox.models.protocol import Message, ToolCall

NO_JSON = "INVALID_JSON"
"""The parameter in a history that holds call arguments which are not a JSON object."""

_INVALID = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64


def for_history(message: Message, tools: Sequence[Mapping[str, object]] = ()) -> Message:
    """Return a response with well-formed tool calls: valid tool names, and objects as arguments.

    Models write malformed calls, and engines pass them on. Sent back unchanged, they make every further request fail:
    vLLM parses the arguments of earlier calls as JSON before it fills in the chat template, and OpenAI validates the
    names. The original arguments are kept as the text of one parameter.

    Args:
        message: the response.
        tools: the tools offered; their names are valid.
    """
    if not message.tool_calls:
        return message
    offered = {function.get("name") for tool in tools if isinstance(function := tool.get("function"), Mapping)}
    return replace(message, tool_calls=tuple(_well_formed(call, call.name in offered) for call in message.tool_calls))


def _well_formed(call: ToolCall, is_offered: bool) -> ToolCall:
    name = call.name if is_offered else _INVALID.sub("_", call.name)[:_LONGEST_NAME] or "_"
    return ToolCall(call.id, name, _object(call.arguments))


def _object(arguments: str) -> str:
    """Return arguments as the text of a JSON object, wrapped if they are something else."""
    try:
        value = json.loads(arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    return arguments or "{}" if isinstance(value, dict) else json.dumps({NO_JSON: arguments})


def _refuse(name: str) -> object:
    """Reject NaN and infinities, which only Python's parser accepts."""
    raise ValueError(name)
