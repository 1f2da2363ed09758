"""A model that returns scripted responses and faults, for tests and reproducible runs, with its own tokeniser."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from minisandbox.errors import BadAnswer, ContextExceeded, InvalidValue, ModelError, ModelRefused, ModelUnavailable
from minisandbox.models.protocol import Completion, FinishReason, Message, Request, Role, Tokens, TokenUsage, ToolCall

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

ALL_OTHERS = "*"
"""The key of a script's default responses, for instances that the script does not name."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One response of a script.

    Attributes:
        message: the message.
        fault: the fault to inject instead of the message, on every try; None for no fault.
    """

    message: Message = field(default_factory=lambda: Message("assistant", ""))
    fault: Fault | None = None

    @classmethod
    def of(cls, body: object) -> Self:
        """Create a reply from a string, a :class:`Message`, a message in OpenAI's format, or ``{"fault": NAME}``.

        Raises:
            InvalidValue: ``body`` has none of these forms, or the fault is unknown.
        """
        if isinstance(body, cls):
            return body
        if isinstance(body, str | Message):
            return cls(Message("assistant", body) if isinstance(body, str) else body)
        if isinstance(body, Mapping) and body.keys() == {"fault"}:
            if body["fault"] in FAULTS:
                return cls(fault=str(body["fault"]))
            raise InvalidValue(f"there is no fault {body['fault']!r}", hint=f"use one of {', '.join(FAULTS)}")
        if not isinstance(body, Mapping) or not body.keys() & {"content", "tool_calls"}:
            raise InvalidValue(f"{str(body)[:100]!r} is not an answer", hint="give a text, a message, or a fault")
        return cls(Message.from_json(body))


Answerer = Callable[[Request], str | Message | Reply]
"""A function that returns the response to a request, or raises a :class:`ModelError`."""


@dataclass(frozen=True, slots=True)
class Script:
    """The responses of a scripted model, in order.

    The number of assistant messages in a request's history selects the response, so a repeated request receives the
    same response.

    Attributes:
        replies: the responses by instance or session; ``*`` for all others.
    """

    replies: Mapping[str, Sequence[Reply]]

    @classmethod
    def of(cls, answers: Sequence[object] | Mapping[str, Sequence[object]]) -> Self:
        """Create a script from strings, messages and faults: one list for all instances, or a list per instance.

        Raises:
            InvalidValue: a response is malformed.
        """
        lists = answers if isinstance(answers, Mapping) else {ALL_OTHERS: answers}
        for name, responses in lists.items():
            if isinstance(responses, str) or not isinstance(responses, Sequence):
                raise InvalidValue(f"the answers for {name!r} are not a list")
        return cls({name: tuple(map(Reply.of, responses)) for name, responses in lists.items()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a script from a file.

        Args:
            path: JSON: a list for all instances, or ``{INSTANCE: [ANSWER, ...]}``; or JSON Lines: one answer, or one
                ``{"instance_id": ..., "answers": [...]}``, per line.

        Raises:
            InvalidValue: the file cannot be read, or is not a script.
        """
        try:
            text = path.read_text(encoding="utf-8")
            answers = _of_lines(text) if path.suffix == ".jsonl" else json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidValue(f"{path} is not a script of answers: {error}") from None
        if not isinstance(answers, list | Mapping):
            raise InvalidValue(f"{path} is not a script of answers", hint="give a list, or a list per instance")
        try:
            return cls.of(answers)
        except InvalidValue as error:
            raise error.about(str(path)) from None

    def __call__(self, request: Request) -> Reply:
        """Respond to a request.

        Raises:
            ModelRefused: the script has no further response for this session.
        """
        replies = self._of_session(request.session)
        turn = sum(message.role == "assistant" for message in request.messages)
        if turn >= len(replies):
            raise ModelRefused(
                f"the script has {len(replies)} answers for {request.session!r}, and one more is requested",
                hint="let its last answer end the agent's loop",
            )
        return replies[turn]

    def _of_session(self, session: str) -> Sequence[Reply]:
        """Return the responses of a session: those of the longest instance name that is a prefix of its name."""
        for end in range(len(session), 0, -1):
            if session[:end] in self.replies and not session[end : end + 1].isalnum():
                return self.replies[session[:end]]
        return self.replies.get(ALL_OTHERS, ())


class ScriptedModel:
    """A model that responds from a script. Its tokeniser has one token per byte, and marks between a message's parts.

    Attributes:
        in_flight: the number of requests in progress.
        most_in_flight: the highest number of concurrent requests so far.

    Args:
        script: responses in order, responses by instance, a script, or a function of the request.
        name: the model's name.
        latency: seconds until a response, or a function that returns the seconds for a request.
        context: maximum tokens of prompt and response together; None for no limit.
        tokens: whether responses have token ids.
    """

    def __init__(
        self,
        script: Answerer | Script | Sequence[object] | Mapping[str, Sequence[object]],
        *,
        name: str = "scripted",
        latency: float | Callable[[Request], float] = 0.0,
        context: int | None = None,
        tokens: bool = True,
    ) -> None:
        self._answer: Answerer = script if callable(script) else Script.of(script)
        self._name = name
        self._latency = latency
        self._context = context
        self._tokens = tokens
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def name(self) -> str:
        """The model's name."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`Model.complete`); for a fault, raise the error that a client would raise.

        Raises:
            ModelError: the script has a fault or no further response.
        """
        began = time.monotonic()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            latency = self._latency(request) if callable(self._latency) else self._latency
            await asyncio.sleep(latency)
            reply = Reply.of(self._answer(request))
            if reply.fault is not None:
                raise _fault_error(reply.fault)
            return self._completion(request, reply.message, began)
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Do nothing, because a scripted model has nothing to release."""

    def _completion(self, request: Request, message: Message, began: float) -> Completion:
        prompt, sampled = encode_prompt(request), encode_message(message)
        available = self._context - len(prompt) if self._context is not None else len(sampled)
        if available < 1:
            raise ContextExceeded(f"the prompt has {len(prompt)} tokens, {self._name} a context of {self._context}")
        limit = min(available, request.sampling.max_tokens or available)
        finish: FinishReason = "tool_calls" if message.tool_calls else "stop"
        if len(sampled) > limit:
            message, finish = decode_answer(sampled[:limit]), "length"
            sampled = encode_message(message)[:-1]
        logprobs = array("d", (-(1 + token % 7) / 8 for token in sampled))
        return Completion(
            message,
            finish,
            TokenUsage(len(prompt), len(sampled)),
            Tokens(prompt, sampled, logprobs) if self._tokens else None,
            seconds=time.monotonic() - began,
            model=self._name,
        )


def _fault_error(fault: Fault) -> ModelError:
    return ENDS_WITH[fault](f"the script's fault: {fault}")


def _of_lines(text: str) -> object:
    """Parse a script in JSON Lines: responses for all instances, or one object per instance."""
    values = [json.loads(line) for line in text.splitlines() if line.strip()]
    scripts = [line for line in values if isinstance(line, Mapping) and "answers" in line]
    if not scripts:
        return values
    if len(scripts) != len(values) or any(script.keys() != {"instance_id", "answers"} for script in scripts):
        raise InvalidValue("lines must be all answers, or all {'instance_id': ..., 'answers': [...]}")
    names = [str(script["instance_id"]) for script in scripts]
    for before, name in itertools.pairwise(sorted(names)):
        if before == name:
            raise InvalidValue(f"there are two lines for {name}")
    return dict(zip(names, (script["answers"] for script in scripts), strict=True))


# The tokeniser has one token per byte, and special tokens, the marks, between the parts of a message. It is reversible,
# and the tokens of a continued conversation start with the tokens of the shorter conversation.

END = 256
_ROLES: dict[Role, int] = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
_TOOLS, _ANSWERS, _THOUGHT, _TEXT, _CALL, _NAME, _ARGUMENTS = range(261, 268)
VOCABULARY = 268
"""The size of the vocabulary."""


def encode_prompt(request: Request) -> array[int]:
    """Return the tokens of a prompt: the tools, the messages, and the mark that starts the response."""
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
    """Return the tokens of a message without the mark of its role, up to and including the end mark."""
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
    """Decode an assistant message; the tokens may be truncated."""
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
    """Split tokens at the marks: yield each mark with the text after it, and 0 with the text before the first mark."""
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
    return array("i", list(text.encode("utf-8", "replace")))  # array would read bytes as raw 4-byte items
