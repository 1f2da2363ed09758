"""Read trajectories of mini-swe-agent: the ``.traj.json`` files of its versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minisandbox.models import Message
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
    items = body.get("messages")
    items = [_chat(item) for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
    if items and items[-1].get("role") == "user" and items[-1].get("content") == (info.get("submission") or ""):
        items.pop()  # version 1 reports the exit in a user message
    items = [item for item in items if item.get("role") != "exit"]
    return messages_of(items, location) if items else ()


def _chat(item: Json) -> Json:
    """Convert an item of OpenAI's Responses API to a message of its chat API; return a message unchanged."""
    if item.get("object") == "response":
        return _answer(item)
    if item.get("type") == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    return {**item, "content": _content(item.get("content"))}


def _answer(response: Json) -> Json:
    items = [item for item in as_list(response.get("output")) if isinstance(item, Mapping)]
    contents = [_content(item.get("content")) for item in items if item.get("type") == "message"]
    thoughts = [
        part.get("text")
        for item in items
        if item.get("type") == "reasoning"
        for part in (*as_list(item.get("summary")), *as_list(item.get("content")))
        if isinstance(part, Mapping)
    ]
    calls = [
        {"id": item.get("call_id") or item.get("id"), "function": item}
        for item in items
        if item.get("type") == "function_call"
    ]
    return {
        "role": "assistant",
        "content": [part for text in contents for part in as_list(text)],
        "reasoning": "\n\n".join(thought for thought in thoughts if isinstance(thought, str)),
        "tool_calls": calls,
    }


def _content(content: object) -> object:
    """Rename the Responses API's types of text parts to the chat API's ``text``."""
    return list(_parts(content)) if isinstance(content, list) else content


def _parts(content: list[object]) -> Iterator[object]:
    for part in content:
        named = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
        yield {**part, "type": "text"} if named and isinstance(part, Mapping) else part
