"""Convert requests and responses of Anthropic's Messages API to and from chat completions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping

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
from minisandbox.models.dialect import arguments_object
from minisandbox.models.protocol import Completion, FinishReason, Message, ToolCall

_TEXT = ("text",)
_SAMPLING = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_STOP_REASONS: Mapping[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# --- requests --------------------------------------------------------------------------------------------------------


def read_request(body: object) -> dict[str, object]:
    """Convert a request to a chat completions request.

    Raises:
        InvalidValue: the request is malformed, or has content other than text.
    """
    fields = object_of(body, "the request")
    history = fields.get("messages")
    if not isinstance(history, list):
        raise InvalidValue("the request has no list of messages")
    messages = []
    if system := joined_text(fields.get("system"), _TEXT, "system"):
        messages.append(Message("system", system))
    for message in history:
        messages += _read_message(object_of(message, "a message"))
    chat: dict[str, object] = {"messages": [message.to_json() for message in messages]}
    if isinstance(fields.get("model"), str):
        chat["model"] = fields["model"]
    if tools := _read_tools(fields.get("tools")):
        chat["tools"] = tools
        chat |= _read_tool_choice(fields.get("tool_choice"))
    chat |= {name: fields[field] for field, name in _SAMPLING.items() if fields.get(field) is not None}
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    output = fields.get("output_config")
    output_format = output.get("format") if isinstance(output, Mapping) else fields.get("output_format")
    if isinstance(output_format, Mapping) and output_format.get("type") == "json_schema":
        chat["response_format"] = json_format(output_format.get("schema"))
    return chat


def _read_message(message: Mapping[str, object]) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidValue("a message's content is neither a text nor a list of blocks")
    blocks = [object_of(block, "a block of a message") for block in content]
    if role == "assistant":
        return [_assistant_message(blocks)]
    if role == "user":
        return list(_user_messages(blocks))
    if role == "system":
        return [Message("system", joined_text(blocks, _TEXT, "a message"))]
    raise InvalidValue(f"a message's role is {str(role)[:100]!r}", hint="use user, assistant or system")


def _user_messages(blocks: list[Mapping[str, object]]) -> Iterator[Message]:
    """Yield one message per tool result, and one for the text blocks between them."""
    text_blocks: list[Mapping[str, object]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            text_blocks.append(block)
            continue
        if text_blocks:
            yield Message("user", joined_text(text_blocks, _TEXT, "a message"))
            text_blocks = []
        output = joined_text(block.get("content"), _TEXT, "a tool_result")
        if block.get("is_error") and not output:
            output = "error"
        yield Message("tool", output, tool_call_id=string_in(block, "tool_use_id", "a tool_result"))
    if text_blocks:
        yield Message("user", joined_text(text_blocks, _TEXT, "a message"))


def _assistant_message(blocks: list[Mapping[str, object]]) -> Message:
    thoughts, text_blocks, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reasoning = unseal(block.get("signature"))
            thoughts.append(string_in(block, "thinking", "a thinking block") if reasoning is None else reasoning)
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(
                ToolCall(string_in(block, "id", "a tool_use"), string_in(block, "name", "a tool_use"), arguments)
            )
        elif kind != "redacted_thinking":  # skip redacted thinking, which another server encrypted
            text_blocks.append(block)
    text = joined_text(text_blocks, _TEXT, "a message")
    return Message("assistant", text, tuple(calls), reasoning="\n".join(thoughts))


def _read_tools(tools: object) -> list[dict[str, object]]:
    """Convert the tools that have a schema; skip the others, which only Anthropic's servers or models know."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidValue("tools is not a list")
    offered = [object_of(tool, "a tool") for tool in tools]
    return [
        function_tool(string_in(tool, "name", "a tool"), tool.get("description"), tool["input_schema"])
        for tool in offered
        if isinstance(tool.get("input_schema"), Mapping)
    ]


def _read_tool_choice(choice: object) -> dict[str, object]:
    if choice is None:
        return {}
    fields = object_of(choice, "tool_choice")
    kind = fields.get("type")
    if kind == "auto":
        return {}
    if kind == "tool":
        function = {"name": string_in(fields, "name", "tool_choice")}
        return {"tool_choice": {"type": "function", "function": function}}
    if kind not in ("any", "none"):
        raise InvalidValue(f"tool_choice has the type {str(kind)[:100]!r}", hint="use auto, any, tool or none")
    return {"tool_choice": "required" if kind == "any" else "none"}


# --- responses -------------------------------------------------------------------------------------------------------


def answer_body(completion: Completion, request: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON of a response.

    Args:
        completion: the response.
        request: the JSON of the request.
    """
    message, usage = completion.message, completion.usage
    blocks: list[dict[str, object]] = []
    if message.reasoning:
        thinking = request.get("thinking")
        is_omitted = isinstance(thinking, Mapping) and thinking.get("display") == "omitted"
        shown = "" if is_omitted else message.reasoning
        blocks.append({"type": "thinking", "thinking": shown, "signature": seal(message.reasoning)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = json.loads(arguments_object(call.arguments))
        blocks.append({"type": "tool_use", "id": call.id or new_id("toolu"), "name": call.name, "input": arguments})
    is_whole = completion.finish_reason != "length"
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": completion.model or str(request.get("model", "")),
        "content": blocks,
        "stop_reason": _STOP_REASONS["tool_calls" if message.tool_calls and is_whole else completion.finish_reason],
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        },
    }


def stream_events(answer: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the events that stream a response."""
    usage, blocks = answer["usage"], answer["content"]
    assert isinstance(usage, dict)
    assert isinstance(blocks, list)
    opening: dict[str, object] = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": {**answer, **opening}}
    for index, block in enumerate(blocks):
        empty, deltas = _deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


def _deltas(block: Mapping[str, object]) -> tuple[dict[str, object], Iterator[dict[str, object]]]:
    """Return a block without its contents, and the stream's deltas that add the contents."""
    if block["type"] == "text":
        return {**block, "text": ""}, _text_deltas("text_delta", "text", block["text"])
    if block["type"] == "tool_use":
        return {**block, "input": {}}, _text_deltas("input_json_delta", "partial_json", json.dumps(block["input"]))
    signature = {"type": "signature_delta", "signature": block["signature"]}
    deltas = itertools.chain(_text_deltas("thinking_delta", "thinking", block["thinking"]), [signature])
    return {**block, "thinking": "", "signature": ""}, deltas


def _text_deltas(kind: str, field: str, text: object) -> Iterator[dict[str, object]]:
    return ({"type": kind, field: piece} for piece in pieces(str(text)))


def error_body(status: int, message: str) -> dict[str, object]:
    """Return the JSON of an error response."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": new_id("req")}


def models_body(names: list[str]) -> dict[str, object]:
    """Return the JSON of a list of models."""
    models = [
        {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"} for name in names
    ]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": models, "has_more": False, "first_id": first, "last_id": last}


_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
MESSAGES = Api("/messages", read_request, answer_body, stream_events, error_body, _PING)
"""Anthropic's Messages API."""
