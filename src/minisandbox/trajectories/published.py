"""Rows of published trajectory sets: conversations with what became of them, in SWE-smith's layout or plainer.

The columns are those of SWE-bench/SWE-smith-trajectories: ``messages`` (a list, or JSON in a text), ``instance_id``,
``resolved``, ``model``, ``traj_id``, ``patch``; each but the first may be missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from minisandbox.errors import InvalidValue, TrajectoryError
from minisandbox.models import Message
from minisandbox.trajectories.example import FORMAT, Example
from minisandbox.trajectories.styles import style_of


def example_of_row(values: Mapping[str, object], *, place: str, source: str, style: str = "") -> Example:
    """Return an example of a row, in our own format or a published one's.

    Args:
        values: its columns.
        place: what errors call it.
        source: the file's name.
        style: the style of its answers; empty: what they look like.

    Raises:
        TrajectoryError: it has no conversation, or one that cannot be read.
    """
    if values.get("format") == FORMAT:
        return Example.from_row(values, place=place)
    messages = messages_of(values.get("messages"), place)
    instance_id = _text(values, "instance_id", place)
    traj_id = _text(values, "traj_id", place) or f"{instance_id}.{_digest(messages)}"
    patch = values.get("patch", values.get("model_patch"))
    tools = values.get("tools") or ()
    return Example(
        traj_id=traj_id,
        instance_id=instance_id or traj_id,
        messages=messages,
        style=style or style_of(messages),
        tools=_tools(tools, place),
        submission=patch.encode("utf-8", "surrogatepass") if isinstance(patch, str) else None,
        reward=reward_of(values),
        model=_text(values, "model", place),
        source=source,
    )


def messages_of(value: object, place: str) -> tuple[Message, ...]:
    """Return a conversation.

    Args:
        value: a list of messages in OpenAI's layout or SWE-agent's, or that as JSON in a text.
        place: what errors call its row.

    Raises:
        TrajectoryError: it is none.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise TrajectoryError(f"{place}: its messages are no JSON", reason=str(error)) from None
    if not isinstance(value, list) or not value:
        raise TrajectoryError(
            f"{place} has no messages", reason="it is a row of something else", hint='a column "messages" holds a list'
        )
    found = []
    for number, one in enumerate(value):
        try:
            found.append(Message.from_json(_plain(one)))
        except InvalidValue as error:
            raise TrajectoryError(f"{place}: message {number}: {error.what}", hint=error.hint) from None
    return tuple(found)


def _plain(message: object) -> object:
    """A message with what SWE-agent has instead of a call's id, and what Hugging Face has instead of JSON."""
    if not isinstance(message, Mapping):
        return message
    body = dict(message)
    ids = body.get("tool_call_ids")
    if body.get("role") == "tool" and not body.get("tool_call_id") and isinstance(ids, list) and ids:
        body["tool_call_id"] = ids[0]
    calls = body.get("tool_calls")
    if isinstance(calls, list):
        body["tool_calls"] = [_with_text(call) for call in calls]
    return body


def _with_text(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    given = {name: value for name, value in arguments.items() if value is not None}  # columns have every call's names
    return {**call, "function": {**function, "arguments": json.dumps(given)}}


def reward_of(values: Mapping[str, object]) -> float | None:
    """Return what a table says of a submission: its ``reward``, else whether it has ``resolved`` the task."""
    for name in ("reward", "resolved"):
        value = values.get(name)
        if isinstance(value, bool | int | float):
            return float(value)
        if name in values and name == "reward":  # ours, where we failed or the pass is unconfirmed
            return None
    return None


def _tools(value: object, place: str) -> tuple[Mapping[str, object], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        raise TrajectoryError(f"{place}: its tools are no list of schemas")
    return tuple(value)


def _text(values: Mapping[str, object], name: str, place: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise TrajectoryError(f"{place}: its {name} is of type {type(value).__name__}, not str")
    return value or ""


def _digest(messages: tuple[Message, ...]) -> str:
    text = json.dumps([message.to_json() for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
