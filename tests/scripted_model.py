"""A scripted model with the faults, the latency and the context limit of a server."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from minisandbox.errors import BadAnswer, ContextExceeded, ModelError, ModelRefused, ModelUnavailable
from minisandbox.models.protocol import Completion, Message, Request, Tokens, TokenUsage, ToolCall
from minisandbox.models.scripted import (
    ALL_OTHERS,
    ARGUMENTS,
    CALL,
    END,
    NAME,
    TEXT,
    THOUGHT,
    Answerer,
    Script,
    ScriptedModel,
    encode_message,
)

Fault = str
"""A fault that a scripted server injects instead of a response.

- ``timeout``: the server sends no response.
- ``reset``, ``reset_mid_answer``: the server resets the connection.
- ``rate_limit``, ``rate_limit_retry_after``: status 429; the second also contains the time to wait.
- ``server_error``: status 500.
- ``invalid_json``, ``empty_choices``, ``empty_answer``, ``aborted``: the response is malformed.
- ``context_length``: status 400, in vLLM's wording.
- ``huge``: the response has 10 MB of text.
- ``drip``: the server sends one byte at a time, forever.
- ``wrong_token_counts``: the response lacks a log-probability.
- ``no_tokens``: the response lacks the requested token ids.
- ``wrong_key``: status 401.
- ``unknown_model``: status 404.
- ``redirect``: status 307, to another host.
"""

ENDS_WITH: Mapping[Fault, type[ModelError]] = {
    "timeout": ModelUnavailable,
    "reset": ModelUnavailable,
    "reset_mid_answer": ModelUnavailable,
    "rate_limit": ModelUnavailable,
    "rate_limit_retry_after": ModelUnavailable,
    "server_error": ModelUnavailable,
    "invalid_json": BadAnswer,
    "empty_choices": BadAnswer,
    "empty_answer": BadAnswer,
    "aborted": BadAnswer,
    "context_length": ContextExceeded,
    "huge": BadAnswer,
    "drip": ModelUnavailable,
    "wrong_token_counts": BadAnswer,
    "no_tokens": ModelRefused,
    "wrong_key": ModelRefused,
    "unknown_model": ModelRefused,
    "redirect": ModelRefused,
}
"""The error that a client raises if every try of a request that requires token ids meets the fault."""

FAULTS: tuple[Fault, ...] = tuple(ENDS_WITH)

Scripted = Answerer | Script | Sequence[object] | Mapping[str, Sequence[object]]
"""The scripts that :class:`ScriptedModel` accepts, in which an answer may be a fault: ``{"fault": NAME}``."""

_MARK = "the fault "


def script_of(answers: Scripted) -> Answerer:
    """Create a script whose answers may be faults."""
    if callable(answers):
        return answers
    lists = answers if isinstance(answers, Mapping) else {ALL_OTHERS: answers}
    return Script.of({name: list(map(_marked, responses)) for name, responses in lists.items()})


def _marked(answer: object) -> object:
    if isinstance(answer, Mapping) and answer.keys() == {"fault"}:
        assert answer["fault"] in FAULTS
        return f"{_MARK}{answer['fault']}"
    return answer


def fault_of(answer: str | Message) -> Fault | None:
    """Return the fault that an answer of :func:`script_of` stands for, or None."""
    text = answer if isinstance(answer, str) else answer.content
    return text.removeprefix(_MARK) if text.startswith(_MARK) else None


class SimulatedModel(ScriptedModel):
    """A scripted model that takes time, has a context, and raises the errors that a client makes of a server's faults.

    Attributes:
        in_flight: the number of requests in progress.
        most_in_flight: the highest number of concurrent requests so far.

    Args:
        script: as for :class:`ScriptedModel`; answers may be faults.
        name: the model's name.
        latency: seconds until a response, or a function that returns the seconds for a request.
        context: maximum tokens of prompt and response together; None for no limit.
    """

    def __init__(
        self,
        script: Scripted,
        *,
        name: str = "scripted",
        latency: float | Callable[[Request], float] = 0.0,
        context: int | None = None,
    ) -> None:
        super().__init__(script_of(script), name=name)
        self._latency = latency
        self._context = context
        self.in_flight = 0
        self.most_in_flight = 0

    async def complete(self, request: Request) -> Completion:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self._latency(request) if callable(self._latency) else self._latency)
            completion = await super().complete(request)
        finally:
            self.in_flight -= 1
        fault = fault_of(completion.message)
        if fault is not None:
            raise ENDS_WITH[fault](f"the script's fault: {fault}")
        return self._truncated(completion, request.sampling.max_tokens)

    def _truncated(self, completion: Completion, most: int | None) -> Completion:
        assert completion.tokens is not None
        prompt, sampled = completion.tokens.prompt, completion.tokens.sampled
        available = len(sampled) if self._context is None else self._context - len(prompt)
        if available < 1:
            raise ContextExceeded(f"the prompt has {len(prompt)} tokens, {self.name} a context of {self._context}")
        limit = min(available, most or available)
        if len(sampled) <= limit:
            return completion
        message = decode_answer(sampled[:limit])
        ids = encode_message(message)[:-1]
        logprobs = array("d", (-(1 + token % 7) / 8 for token in ids))
        usage, tokens = TokenUsage(len(prompt), len(ids)), Tokens(prompt, ids, logprobs)
        return replace(completion, message=message, finish_reason="length", usage=usage, tokens=tokens)


def decode_answer(ids: Sequence[int]) -> Message:
    """Decode an assistant message; the tokens may be truncated."""
    content, reasoning = "", ""
    calls: list[ToolCall] = []
    for mark, text in _parts(ids):
        if mark in (0, TEXT):
            content += text
        elif mark == THOUGHT:
            reasoning = text
        elif mark == CALL:
            calls.append(ToolCall(text, "", ""))
        elif mark == NAME and calls:
            calls[-1] = ToolCall(calls[-1].id, text, "")
        elif mark == ARGUMENTS and calls:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, text)
    return Message("assistant", content, tuple(calls), reasoning=reasoning)


def _parts(ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Split tokens at the marks: yield each mark with the text after it, and 0 with the text before the first mark."""
    mark, text = 0, bytearray()
    for token in ids:
        if token < END:
            text.append(token)
            continue
        yield mark, text.decode("utf-8", "ignore")
        mark, text = token, bytearray()
    yield mark, text.decode("utf-8", "ignore")
