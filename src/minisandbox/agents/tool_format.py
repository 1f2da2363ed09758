"""The tool format: actions as calls of tools, in OpenAI's layout. An answer may hold several."""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.agents.actions import BASH, SUBMIT, TOOLS, Action, FormatError, action_of, arguments_of, name_of
from minisandbox.models import Message, ToolCall

MOST_CALLS = 16
"""Calls in one answer, which is one step of a rollout however many they are."""


class ToolFormat:
    """Actions as tool calls. One call that cannot be understood keeps all of the answer from being done."""

    name = "tool"
    reminder = f"Answer with a call of a tool: {BASH}, or {SUBMIT} when you are done."

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """The schemas."""
        return TOOLS

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the calls, in order.

        Raises:
            FormatError: there is none, there are too many, or one cannot be understood.
        """
        if not message.tool_calls:
            raise FormatError("Your answer calls no tool.")
        if len(message.tool_calls) > MOST_CALLS:
            raise FormatError(f"Your answer has {len(message.tool_calls)} calls; it may have {MOST_CALLS}.")
        return tuple(_action(call) for call in message.tool_calls)

    def render(self, *actions: Action) -> Message:
        """Return an answer that calls these, numbered."""
        calls = (
            ToolCall(f"call_{number}", name_of(action), json.dumps(arguments_of(action)))
            for number, action in enumerate(actions)
        )
        return Message("assistant", "", tuple(calls))

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the answer to a call."""
        return Message("tool", text, tool_call_id=message.tool_calls[number].id)

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return an answer to each call, as engines want it, or the user's where there is none."""
        if not message.tool_calls:
            return (Message("user", text),)
        return tuple(Message("tool", text, tool_call_id=call.id) for call in message.tool_calls)


def _action(call: ToolCall) -> Action:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, json.JSONDecodeError) else "it is too deep, or a number is too long"
        raise FormatError(f"The arguments of {call.name[:80]!r} are not JSON: {what[:200]}.") from None
    if not isinstance(arguments, dict):
        raise FormatError(f"The arguments of {call.name[:80]!r} are not a JSON object.")
    return action_of(call.name, arguments)
