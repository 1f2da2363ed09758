"""Read trajectories of mini-swe-agent: the ``.traj.json`` files of its versions 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.errors import InvalidValue, TrajectoryError
from minisandbox.models import Message
from minisandbox.models.openai_responses import read_request
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.published import Json, as_list, as_object, as_text, digest_of, messages_of, reward_of
from minisandbox.trajectories.styles import style_of

_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The tool of all versions that use tool calls, defined here because trajectories do not contain its schema."""


_PARTS = ("message", "reasoning", "function_call")
"""The parts of a response of the Responses API that are read; others are the server's own tools."""


def is_mini(body: Json) -> bool:
    """Return whether an object has the fields of a mini-swe-agent trajectory. Files before 1.4 name no format."""
    messages, info = body.get("messages"), body.get("info")
    return isinstance(messages, list) and isinstance(info, Mapping) and "model_stats" in info


def example_of_mini(body: Json, *, location: str, source: str, name: str = "", style: str = "") -> Example:
    """Convert a trajectory to an example. The example has no messages if the agent failed before the first message.

    Args:
        body: the trajectory.
        location: the trajectory's name in error messages.
        source: the name of the file or run.
        name: the task's id, used if the trajectory has no id.
        style: the style of the responses; "" to detect it.

    Raises:
        TrajectoryError: a message cannot be read.
    """
    info = as_object(body.get("info"))
    messages = _messages(body, info, location)
    instance_id = as_text(body.get("instance_id")) or name
    traj_id = f"{instance_id}.{digest_of(messages)}"
    status = as_text(info.get("exit_status"))
    patch = info.get("submission")
    return Example(
        traj_id=traj_id,
        instance_id=instance_id or traj_id,
        messages=messages,
        style=style or style_of(messages),
        tools=(_TOOL,) if any(message.tool_calls for message in messages) else (),
        submission=patch.encode("utf-8", "surrogatepass") if isinstance(patch, str) else None,
        reward=reward_of(body),
        exit_status="submitted" if status == "Submitted" else status or None,
        model=as_text(as_object(as_object(info.get("config")).get("model")).get("model_name")),
        agent="mini-swe-agent",
        source=source,
    )


def _messages(body: Json, info: Json, location: str) -> tuple[Message, ...]:
    """Return the messages that the model read or wrote, without the final message that reports the exit."""
    items = [item for item in as_list(body.get("messages")) if isinstance(item, Mapping)]
    if items and items[-1].get("role") == "user" and items[-1].get("content") == (info.get("submission") or ""):
        items.pop()  # version 1 reports the exit in a user message
    items = [item for item in items if item.get("role") != "exit"]
    if not any(item.get("object") == "response" for item in items):
        return messages_of(items, location) if items else ()
    inputs: list[object] = []  # in the form in which a client of the Responses API sends them back
    for item in items:
        if item.get("object") == "response":
            parts = map(as_object, as_list(item.get("output")))
            inputs += [part for part in parts if part.get("type") in _PARTS]
        else:
            inputs.append(item)
    try:
        chat = read_request({"input": inputs})
    except InvalidValue as error:
        raise TrajectoryError(f"{location}: {error.what}", hint=error.hint) from None
    return messages_of(chat["messages"], location)
