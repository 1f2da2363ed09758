"""The tool format: actions as tool calls in OpenAI's format. A response may have several."""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.agents.actions import BASH, SUBMIT, TOOLS, Action, FormatError, action_of, arguments_of, name_of
from minisandbox.models import Message, ToolCall

MOST_CALLS = 16
"""Maximum calls in one response, which is one step of a rollout in any case."""


class ToolFormat:
    """Actions as tool calls. If one call is malformed, none of the response is performed."""

    name = "tool"
    reminder = f"Answer with a call of a tool: {BASH}, or {SUBMIT} when you are done."

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """The tools' schemas."""
        return TOOLS

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the response's actions, in order.

        Raises:
            FormatError: it has no calls, too many, or a malformed one.
        """
        if not message.tool_calls:
            raise FormatError("Your answer calls no tool.")
        if len(message.tool_calls) > MOST_CALLS:
            raise FormatError(f"Your answer has {len(message.tool_calls)} calls; it may have {MOST_CALLS}.")
        return tuple(_action(call) for call in message.tool_calls)

    def render(self, *actions: Action) -> Message:
        """Return a response with these actions as numbered calls."""
        calls = (
            ToolCall(f"call_{number}", name_of(action), json.dumps(arguments_of(action)))
            for number, action in enumerate(actions)
        )
        return Message("assistant", "", tuple(calls))

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the tool message with a call's result."""
        return Message("tool", text, tool_call_id=message.tool_calls[number].id)

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return a tool message for each call, as engines require, or a user message if there was no call."""
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
