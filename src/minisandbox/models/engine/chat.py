"""Convert messages to prompts and sampled text to messages, with a model's own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from minisandbox.errors import ModelRefused
from minisandbox.models.protocol import Message, Request, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How Qwen, Hermes and SmolLM3 write calls: one JSON object each.
_BEGIN, _END = "<tool_call>", "</tool_call>"


class ChatFormat:
    """A tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Raises:
        ModelRefused: it has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelRefused(
                "the model's tokenizer has no chat template",
                reason="it is a base model, not tuned on conversations",
                hint="use an instruction-tuned model, or give the tokenizer a template",
            )
        self._tokenizer = tokenizer
        self._takes_tools = "tools" in str(tokenizer.chat_template)

    def render(self, request: Request, *answer: Message) -> str:
        """Return the text of a conversation; without an answer it ends where the model continues.

        Raises:
            ModelRefused: the template does not support these messages, or tools.
        """
        return self._render(request, answer, ask=not answer)

    def render_unasked(self, request: Request) -> str:
        """Return the text of a conversation without the start of a response."""
        return self._render(request, (), ask=False)

    def _render(self, request: Request, answer: Sequence[Message], *, ask: bool) -> str:
        if request.tools and not self._takes_tools:
            raise ModelRefused(
                "the model's chat template does not support tools",
                hint="use an action format in text, or another model",
            )
        options = request.sampling.extra.get("chat_template_kwargs") or {}
        try:
            text = self._tokenizer.apply_chat_template(
                [_plain(message) for message in (*request.messages, *answer)],
                tools=[dict(tool) for tool in request.tools] or None,
                add_generation_prompt=ask,
                tokenize=False,
                **(options if isinstance(options, Mapping) else {}),
            )
        except Exception as error:  # templates are programs: they may raise anything
            raise ModelRefused(f"the model's chat template rejected the messages: {error}") from error
        return str(text)

    def read(self, text: str, request: Request) -> Message:
        """Return the message of a sampled text; tool calls are parsed only if tools were offered."""
        found = list(_written_calls(text)) if request.tools else []
        seed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        calls = [_tool_call(call, f"{len(request.messages)}.{n}.{seed}") for n, (_, call) in enumerate(found)]
        if not found or None in calls:
            return Message("assistant", text)  # malformed calls are text: the agent reports them to the model
        return Message("assistant", text[: found[0][0]].strip(), tuple(call for call in calls if call))


def _written_calls(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start and the JSON text of each call, in time linear in the text's length."""
    at = 0
    while (start := text.find(_BEGIN, at)) >= 0:
        at = opening = _skip_space(text, start + len(_BEGIN))
        if not text.startswith("{", opening):
            continue
        while (at := text.find(_END, at)) >= 0:
            closing = _skip_space(text, at - 1, -1)
            at += len(_END)
            if text[closing] == "}":
                yield start, text[opening : closing + 1]
                break
        else:
            return  # no end for later calls either


def _skip_space(text: str, at: int, step: int = 1) -> int:
    while 0 <= at < len(text) and text[at].isspace():
        at += step
    return at


def _tool_call(text: str, seed: str) -> ToolCall | None:
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            return None
        arguments = json.dumps(body.get("arguments", {}), ensure_ascii=False)
    except (ValueError, RecursionError):  # degenerate samples repeat: a thousand brackets are not rare
        return None
    # not random: a seeded response must be reproducible
    name = hashlib.sha256(seed.encode()).hexdigest()[:24]
    return ToolCall(f"call_{name}", body["name"], arguments)


def _plain(message: Message) -> dict[str, object]:
    """Return a message for a template, where calls' arguments are objects instead of text."""
    body = message.to_json()
    calls = body.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # not JSON: kept as text
    return body
