"""Convert requests and responses of OpenAI's Responses API to and from chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from minisandbox.errors import InvalidValue
from minisandbox.models.apis import (
    Api,
    function_tool,
    joined_text,
    json_format,
    new_id,
    object_of,
    pieces,
    seal,
    string_in,
    unseal,
)
from minisandbox.models.http import is_about_length
from minisandbox.models.protocol import Completion, Message, Role, ToolCall

_TEXT = ("input_text", "output_text", "text", "refusal")
_ROLES: Mapping[object, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_SAMPLING = {"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
_STORED = "this server stores no responses; send the whole conversation as input"
_REFUSED = ("previous_response_id", "conversation", "background", "prompt")
_ECHOED: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}


# --- tools -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool that the request offers.

    Attributes:
        name: the tool's name.
        namespace: the namespace that contains the tool, or "".
        is_custom: whether the tool's input is free text instead of a JSON object.
    """

    name: str
    namespace: str = ""
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        """The name that the model sees."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


def _read_tools(tools: object, namespace: str = "") -> Iterator[tuple[_Tool, dict[str, object]]]:
    """Yield function and custom tools, each as a chat completions tool; skip tools that OpenAI's servers run."""
    if tools is not None and not isinstance(tools, list):
        raise InvalidValue("tools is not a list")
    for tool in tools or ():
        fields = object_of(tool, "a tool")
        kind = fields.get("type")
        if kind == "namespace":
            yield from _read_tools(fields.get("tools"), string_in(fields, "name", "a namespace"))
        elif kind in ("function", "custom"):
            offered = _Tool(string_in(fields, "name", "a tool"), namespace, kind == "custom")
            description, parameters = fields.get("description"), fields.get("parameters")
            if offered.is_custom:
                parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
                syntax = fields.get("format")
                if isinstance(syntax, Mapping) and syntax.get("type") == "grammar":
                    description = f"{description or ''}\nThe input follows this grammar:\n{syntax.get('definition')}"
            yield offered, function_tool(offered.function_name, description, parameters)


def _read_tool_choice(choice: object) -> dict[str, object]:
    if choice in (None, "auto"):
        return {}
    if choice in ("none", "required"):
        return {"tool_choice": choice}
    fields = object_of(choice, "tool_choice")
    if fields.get("type") not in ("function", "custom"):
        return {}
    name = _Tool(string_in(fields, "name", "tool_choice"), str(fields.get("namespace") or "")).function_name
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


# --- requests --------------------------------------------------------------------------------------------------------


def read_request(body: object) -> dict[str, object]:
    """Convert a request to a chat completions request.

    Raises:
        InvalidValue: the request is malformed, refers to stored responses, or has content other than text.
    """
    fields = object_of(body, "the request")
    if refused := next((name for name in _REFUSED if fields.get(name)), None):
        raise InvalidValue(f"{refused} is not supported: {_STORED}")
    messages = []
    if instructions := fields.get("instructions"):
        messages.append(Message("system", joined_text(instructions, _TEXT, "instructions")))
    messages += _read_input(fields.get("input"))
    chat: dict[str, object] = {"messages": [message.to_json() for message in messages]}
    if isinstance(fields.get("model"), str):
        chat["model"] = fields["model"]
    if tools := [tool for _, tool in _read_tools(fields.get("tools"))]:
        chat["tools"] = tools
        chat |= _read_tool_choice(fields.get("tool_choice"))
    chat |= {name: fields[field] for field, name in _SAMPLING.items() if fields.get(field) is not None}
    text = fields.get("text")
    text_format = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(text_format, Mapping) and text_format.get("type") == "json_schema":
        chat["response_format"] = json_format(text_format.get("schema"))
    elif isinstance(text_format, Mapping) and text_format.get("type") == "json_object":
        chat["response_format"] = {"type": "json_object"}
    return chat


def _read_input(items: object) -> list[Message]:
    """Convert input items to messages; join the reasoning, text and calls of one response to one message."""
    if isinstance(items, str):
        return [Message("user", items)]
    if not isinstance(items, list):
        raise InvalidValue("the request's input is neither a text nor a list of items")
    messages: list[Message] = []
    for item in items:
        message = _read_item(object_of(item, "an item of input"))
        if messages and _continues(messages[-1], message):
            earlier = messages.pop()
            message = replace(
                message,
                content=earlier.content or message.content,
                tool_calls=earlier.tool_calls + message.tool_calls,
                reasoning=earlier.reasoning or message.reasoning,
            )
        messages.append(message)
    return messages


def _continues(earlier: Message, message: Message) -> bool:
    """Return whether an assistant message is the next part of the same response."""
    if earlier.role != "assistant" or message.role != "assistant" or message.reasoning:
        return False
    return bool(message.tool_calls) or not (earlier.content or earlier.tool_calls)


def _read_item(item: Mapping[str, object]) -> Message:
    kind = item.get("type") or "message"
    if kind == "message":
        role = _ROLES.get(item.get("role"))
        if role is None:
            raise InvalidValue(f"a message's role is {str(item.get('role'))[:100]!r}")
        return Message(role, joined_text(item.get("content"), _TEXT, "a message"))
    if kind == "reasoning":
        return Message("assistant", "", reasoning=_read_reasoning(item))
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = joined_text(item.get("output"), _TEXT, f"a {kind}")
        return Message("tool", output, tool_call_id=string_in(item, "call_id", f"a {kind}"))
    if kind not in ("function_call", "custom_tool_call"):
        raise InvalidValue(f"input has an item of type {str(kind)[:100]!r}, which is not supported")
    tool = _Tool(string_in(item, "name", f"a {kind}"), str(item.get("namespace") or ""))
    if kind == "function_call":
        arguments = string_in(item, "arguments", "a function_call")
    else:
        arguments = json.dumps({"input": string_in(item, "input", "a custom_tool_call")}, ensure_ascii=False)
    call = ToolCall(string_in(item, "call_id", f"a {kind}"), tool.function_name, arguments)
    return Message("assistant", "", (call,))


def _read_reasoning(item: Mapping[str, object]) -> str:
    reasoning = unseal(item.get("encrypted_content"))
    if reasoning is not None:
        return reasoning
    kinds = ("reasoning_text", "summary_text", "text")
    content = item.get("content") or item.get("summary")
    return joined_text(content, kinds, "a reasoning item")


# --- responses -------------------------------------------------------------------------------------------------------


def answer_body(completion: Completion, request: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON of a response.

    Args:
        completion: the response.
        request: the JSON of the request.
    """
    usage, is_whole = completion.usage, completion.finish_reason != "length"
    tools = {tool.function_name: tool for tool, _ in _read_tools(request.get("tools"))}
    items = list(_output_items(completion.message, tools))
    if items and not is_whole:
        items[-1]["status"] = "incomplete"
    echoed = {name: request[name] if request.get(name) is not None else value for name, value in _ECHOED.items()}
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if is_whole else "incomplete",
        "background": False,
        "error": None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "model": completion.model or str(request.get("model", "")),
        "output": items,
        "previous_response_id": None,
        "store": False,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        },
        **echoed,
    }


def _output_items(message: Message, tools: Mapping[str, _Tool]) -> Iterator[dict[str, object]]:
    if message.reasoning:
        yield {
            "id": new_id("rs"),
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": message.reasoning}],
            "encrypted_content": seal(message.reasoning),
            "status": "completed",
        }
    if message.content:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        yield {"id": new_id("msg"), "type": "message", "role": "assistant", "content": [part], "status": "completed"}
    for call in message.tool_calls:
        tool = tools.get(call.name, _Tool(call.name))
        item: dict[str, object] = {"call_id": call.id or new_id("call"), "name": tool.name, "status": "completed"}
        if tool.namespace:
            item["namespace"] = tool.namespace
        if tool.is_custom:
            yield {"id": new_id("ctc"), "type": "custom_tool_call", "input": _custom_input(call.arguments), **item}
        else:
            yield {"id": new_id("fc"), "type": "function_call", "arguments": call.arguments, **item}


def _custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool's call; malformed arguments are returned unchanged."""
    try:
        fields = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = fields.get("input") if isinstance(fields, dict) else None
    return text if isinstance(text, str) else arguments


def stream_events(answer: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the events that stream a response, with sequence numbers."""
    return ({**event, "sequence_number": number} for number, event in enumerate(_events(answer)))


def _events(answer: Mapping[str, object]) -> Iterator[dict[str, object]]:
    opening: dict[str, object] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    started = {**answer, **opening}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    items = answer["output"]
    assert isinstance(items, list)
    for index, item in enumerate(items):
        position = {"output_index": index, "item_id": item["id"]}
        empty, events = _item_events(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": {**empty, "status": "in_progress"}}
        for event in events:
            yield {**event, **position}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{answer['status']}", "response": answer}


def _item_events(item: Mapping[str, object]) -> tuple[dict[str, object], Iterator[dict[str, object]]]:
    """Return an item without its contents, and the stream's events that add the contents, except for the position."""
    if item["type"] == "function_call":
        return {**item, "arguments": ""}, _field_events("response.function_call_arguments", "arguments", item)
    if item["type"] == "custom_tool_call":
        return {**item, "input": ""}, _field_events("response.custom_tool_call_input", "input", item)
    content = item["content"]
    assert isinstance(content, list)
    (part,) = content
    if item["type"] == "reasoning":
        return {**item, "content": [], "encrypted_content": None}, _part_events("response.reasoning_text", part, {})
    return {**item, "content": []}, _part_events("response.output_text", part, {"logprobs": []})


def _field_events(name: str, field: str, item: Mapping[str, object]) -> Iterator[dict[str, object]]:
    text = str(item[field])
    for piece in pieces(text):
        yield {"type": f"{name}.delta", "delta": piece}
    ending = {"name": item["name"]} if field == "arguments" else {}
    yield {"type": f"{name}.done", field: text, **ending}


def _part_events(name: str, part: Mapping[str, object], extra: Mapping[str, object]) -> Iterator[dict[str, object]]:
    text, position = str(part["text"]), {"content_index": 0}
    yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **position}
    for piece in pieces(text):
        yield {"type": f"{name}.delta", "delta": piece, **position, **extra}
    yield {"type": f"{name}.done", "text": text, **position, **extra}
    yield {"type": "response.content_part.done", "part": part, **position}


def failure_event(status: int, message: str) -> dict[str, object]:
    """Return the event that ends a stream with an error."""
    code = "context_length_exceeded" if is_about_length(status, message.encode()) else "server_error"
    response = {"id": new_id("resp"), "object": "response", "created_at": int(time.time()), "status": "failed"}
    error = {"code": code, "message": message}
    return {"type": "response.failed", "sequence_number": 0, "response": {**response, "output": [], "error": error}}


RESPONSES = Api("/responses", read_request, answer_body, stream_events, failure_event)
"""OpenAI's Responses API."""
