"""Read rows of published trajectory data sets, in SWE-smith's layout or a subset of its columns, and foreign JSON.

The columns are those of SWE-bench/SWE-smith-trajectories: ``messages`` (a list, or JSON text), ``instance_id``,
``resolved``, ``model``, ``traj_id``, ``patch``. Only ``messages`` is required.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from minisandbox.errors import InvalidValue, TrajectoryError
from minisandbox.models import Message
from minisandbox.trajectories.example import FORMAT, Example
from minisandbox.trajectories.styles import style_of

Json = Mapping[str, object]


def as_object(value: object) -> dict[str, object]:
    """Return a decoded JSON object, or an empty object instead of any other value."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[object]:
    """Return a decoded JSON list, or an empty list instead of any other value."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str:
    """Return a string, or "" instead of any other value."""
    return value if isinstance(value, str) else ""


def without_surrogates(body: Json) -> dict[str, object]:
    """Return a JSON object with unpaired surrogates replaced by question marks, because other programs reject them."""
    return as_object(json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")))


def read_json(file: Path) -> object:
    """Return the JSON of another program's file, in which invalid UTF-8 is replaced.

    Raises:
        TrajectoryError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(file.read_bytes().decode("utf-8", "replace"))
    except OSError as error:
        raise TrajectoryError(f"{file} cannot be read", reason=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{file} is not JSON", reason=f"it may be damaged: {error}") from error


def example_of_row(values: Mapping[str, object], *, location: str, source: str, style: str = "") -> Example:
    """Convert a row to an example. The row may be in this package's format or in a published layout.

    Args:
        values: the row's columns.
        location: the row's name in error messages.
        source: the file's name.
        style: the style of the row's responses; "" to detect it.

    Raises:
        TrajectoryError: the row has no conversation, or a malformed value.
    """
    if values.get("format") == FORMAT:
        return Example.from_row(values, location=location)
    messages = messages_of(values.get("messages"), location)
    instance_id = _text(values, "instance_id", location)
    traj_id = _text(values, "traj_id", location) or f"{instance_id}.{digest_of(messages)}"
    patch = values.get("patch", values.get("model_patch"))
    tools = values.get("tools") or ()
    return Example(
        traj_id=traj_id,
        instance_id=instance_id or traj_id,
        messages=messages,
        style=style or style_of(messages),
        tools=_tools(tools, location),
        submission=patch.encode("utf-8", "surrogatepass") if isinstance(patch, str) else None,
        reward=reward_of(values),
        model=_text(values, "model", location),
        source=source,
    )


def messages_of(value: object, location: str) -> tuple[Message, ...]:
    """Return a conversation's messages.

    Args:
        value: a list of messages in OpenAI's or SWE-agent's format, or the same as JSON text.
        location: the row's name in error messages.

    Raises:
        TrajectoryError: the value is not a conversation.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise TrajectoryError(f"{location}: its messages are not JSON", reason=str(error)) from None
    if not isinstance(value, list) or not value:
        raise TrajectoryError(
            f"{location} has no messages",
            reason="it is not a conversation",
            hint='the column "messages" must be a list',
        )
    messages = []
    for number, message in enumerate(value):
        try:
            messages.append(Message.from_json(_plain(message)))
        except InvalidValue as error:
            raise TrajectoryError(f"{location}: message {number}: {error.what}", hint=error.hint) from None
    return tuple(messages)


def _plain(message: object) -> object:
    """Convert SWE-agent's field for call ids, and JSON that ``datasets`` decoded, to OpenAI's message format."""
    if not isinstance(message, Mapping):
        return message
    body = dict(message)
    content = body.get("content")
    if isinstance(content, Mapping | int | float):  # datasets 5 decodes text that looks like JSON in mixed columns
        body["content"] = json.dumps(content, ensure_ascii=False)
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
    # in a Parquet struct, each call has the keys of all calls, with None for the keys that it lacks
    present = {name: value for name, value in arguments.items() if value is not None}
    return {**call, "function": {**function, "arguments": json.dumps(present)}}


def reward_of(values: Mapping[str, object]) -> float | None:
    """Return a row's ``reward``; without this column, 1.0 or 0.0 from ``resolved``; None if both are missing."""
    for name in ("reward", "resolved"):
        value = values.get(name)
        if isinstance(value, bool | int | float):
            return float(value)
        if name in values and name == "reward":  # null means an infrastructure error or unconfirmed pass
            return None
    return None


def _tools(value: object, location: str) -> tuple[Mapping[str, object], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise TrajectoryError(f"{location}: its tools are not a list of JSON schemas")
    return tuple(value)


def _text(values: Mapping[str, object], name: str, location: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise TrajectoryError(f"{location}: {name} is of type {type(value).__name__}, not str")
    return value or ""


def digest_of(messages: tuple[Message, ...]) -> str:
    """Return a short hash of a conversation, which serves as the id of a rollout without an id."""
    text = json.dumps([message.to_json() for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
