"""From messages to a prompt and from sampled text to a message, by a model's own chat template."""

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
        tokenizer: of transformers, with a chat template.

    Raises:
        ModelRefused: it has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelRefused(
                "the model's tokenizer has no chat template",
                reason="it is a base model, which was not tuned on conversations",
                hint="take an instruction-tuned model, or give the tokenizer a template",
            )
        self._tokenizer = tokenizer
        self._takes_tools = "tools" in str(tokenizer.chat_template)

    def render(self, request: Request, *answer: Message) -> str:
        """Return the text of a conversation; where no answer is given it ends where the model is to go on.

        Raises:
            ModelRefused: the template cannot show such messages, or no tools.
        """
        return self._render(request, answer, ask=not answer)

    def render_unasked(self, request: Request) -> str:
        """Return the text of a conversation without the beginning of an answer."""
        return self._render(request, (), ask=False)

    def _render(self, request: Request, answer: Sequence[Message], *, ask: bool) -> str:
        if request.tools and not self._takes_tools:
            raise ModelRefused(
                "the model's chat template knows no tools",
                hint="have the agent write its actions as text, or take another model",
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
        except Exception as error:  # templates are programs: they raise what they like
            raise ModelRefused(f"the model's chat template refuses the messages: {error}") from error
        return str(text)

    def read(self, text: str, request: Request) -> Message:
        """Return the message that a sampled text is. Calls are looked for only where tools were offered."""
        found = list(_written_calls(text)) if request.tools else []
        seed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        calls = [_tool_call(call, f"{len(request.messages)}.{n}.{seed}") for n, (_, call) in enumerate(found)]
        if not found or None in calls:
            return Message("assistant", text)  # what is no call is text: the agent tells the model so
        return Message("assistant", text[: found[0][0]].strip(), tuple(call for call in calls if call))


def _written_calls(text: str) -> Iterator[tuple[int, str]]:
    """Yield where each call begins, and what braces enclose in it, in time in proportion to the text's length."""
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
            return  # nor is there an end for one that begins later


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
    except (ValueError, RecursionError):  # samplers repeat themselves: a thousand brackets are not rare
        return None
    # not random: a seeded answer is the same each time
    name = hashlib.sha256(seed.encode()).hexdigest()[:24]
    return ToolCall(f"call_{name}", body["name"], arguments)


def _plain(message: Message) -> dict[str, object]:
    """A message as templates take it: arguments of calls are objects in there, not text."""
    body = message.to_json()
    calls = body.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # sampled, and no JSON: shown as it is
    return body
