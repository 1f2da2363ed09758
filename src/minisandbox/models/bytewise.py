"""The scripted model's tokeniser: one token per byte, and one per mark between the parts of a message.

It is reversible, and the tokens of a continued conversation start with those of the shorter one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence

from minisandbox.models.protocol import Message, Request, Role, ToolCall

END = 256
_ROLES: dict[Role, int] = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
_TOOLS, _ANSWERS, _THOUGHT, _TEXT, _CALL, _NAME, _ARGUMENTS = range(261, 268)
VOCABULARY = 268
"""The number of different tokens."""


def encode_prompt(request: Request) -> array[int]:
    """Return the model's input: the tools, the messages, and the mark after which it answers."""
    ids = array("i")
    if request.tools:
        ids.append(_TOOLS)
        ids += _bytes(json.dumps([dict(tool) for tool in request.tools], sort_keys=True))
        ids.append(END)
    for message in request.messages:
        ids.append(_ROLES[message.role])
        ids += encode_message(message)
    ids.append(_ROLES["assistant"])
    return ids


def encode_message(message: Message) -> array[int]:
    """Return a message's tokens, from after its role's mark to its end mark."""
    ids = array("i")
    if message.tool_call_id is not None:
        ids += _marked(_ANSWERS, message.tool_call_id)
    if message.reasoning:
        ids += _marked(_THOUGHT, message.reasoning)
    if message.content:
        ids += _marked(_TEXT, message.content) if ids else _bytes(message.content)
    for call in message.tool_calls:
        ids += _marked(_CALL, call.id)
        for mark, text in ((_NAME, call.name), (_ARGUMENTS, call.arguments)):
            ids += _marked(mark, text) if text else array("i")
    ids.append(END)
    return ids


def decode_answer(ids: Sequence[int]) -> Message:
    """Return the message of an assistant's tokens, which may be cut off."""
    content, reasoning = "", ""
    calls: list[ToolCall] = []
    for mark, text in _parts(ids):
        if mark in (0, _TEXT):
            content += text
        elif mark == _THOUGHT:
            reasoning = text
        elif mark == _CALL:
            calls.append(ToolCall(text, "", ""))
        elif mark == _NAME and calls:
            calls[-1] = ToolCall(calls[-1].id, text, "")
        elif mark == _ARGUMENTS and calls:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, text)
    return Message("assistant", content, tuple(calls), reasoning=reasoning)


def _parts(ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Split tokens at the marks: each mark with the text after it; 0 for the text before the first."""
    mark, text = 0, bytearray()
    for token in ids:
        if token < END:
            text.append(token)
            continue
        yield mark, text.decode("utf-8", "ignore")
        mark, text = token, bytearray()
    yield mark, text.decode("utf-8", "ignore")


def _marked(mark: int, text: str) -> array[int]:
    return array("i", [mark]) + _bytes(text)


def _bytes(text: str) -> array[int]:
    return array("i", list(text.encode("utf-8", "replace")))  # array takes bytes as raw 4-byte items
