"""The interface of language models: messages, requests, responses with their token ids, and reproducible seeds."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self

from minisandbox.errors import InvalidValue

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call requested by the model.

    Attributes:
        id: the id by which the tool's result refers to the call.
        name: the name of the tool.
        arguments: the arguments as sampled JSON text, possibly malformed.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as in OpenAI's chat completions API.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: the text of the message.
        tool_calls: the tool calls of an assistant message.
        tool_call_id: the id of the tool call that a tool message responds to.
        reasoning: the reasoning that the engine separated from an assistant message's text. Later requests send it back
            unchanged.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""

    def to_json(self, reasoning_field: str = "reasoning_content") -> dict[str, object]:
        """Return the message in the chat completions API's format.

        Args:
            reasoning_field: the server's name for the reasoning field; vLLM uses ``reasoning`` since 0.12.
        """
        body: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            body["tool_calls"] = [_call_body(call, call.arguments) for call in self.tool_calls]
        if self.tool_call_id is not None:
            body["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            body[reasoning_field] = self.reasoning
        return body

    def for_template(self) -> dict[str, object]:
        """Return the message for a chat template: arguments of calls as objects, reasoning under both usual names."""
        body = self.to_json()
        if self.reasoning:
            body["reasoning"] = self.reasoning
        if self.tool_calls:
            body["tool_calls"] = [_call_body(call, _object_or_text(call.arguments)) for call in self.tool_calls]
        return body

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Read a message in the chat completions API's format.

        Raises:
            InvalidValue: the message is malformed.
        """
        if not isinstance(body, Mapping):
            raise InvalidValue(f"a message is {type(body).__name__}, not an object")
        role = body.get("role", "assistant")
        if role not in _ROLES:
            raise InvalidValue(f"a message's role is {role!r}", hint=f"use one of {', '.join(_ROLES)}")
        calls = body.get("tool_calls") or ()
        if not isinstance(calls, list | tuple):
            raise InvalidValue("a message's tool_calls are not a list")
        answers = body.get("tool_call_id")
        return cls(
            role,
            _text(body.get("content")),
            tuple(map(_tool_call, calls)),
            answers if isinstance(answers, str) else None,
            _text(body.get("reasoning_content") or body.get("reasoning")),
        )


def _call_body(call: ToolCall, arguments: object) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object_or_text(arguments: str) -> object:
    """Return a call's arguments as an object, or unchanged if they are not a JSON object."""
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _tool_call(body: object) -> ToolCall:
    function = body.get("function") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(function, Mapping):
        raise InvalidValue("a tool call names no function")
    parts = (body.get("id") or "", function.get("name"), function.get("arguments") or "")
    if not all(isinstance(part, str) for part in parts):
        raise InvalidValue("a tool call's id, name or arguments are not strings")
    return ToolCall(*map(str, parts))


def _text(content: object) -> str:
    """Return the text of a message's content; join the parts if the content is a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise InvalidValue("a message's content is not text", hint="images and audio are not supported")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling options of a response.

    Values other than the defaults change the distribution that tokens are sampled from. The log-probabilities then
    differ from the model's own, and so do the importance ratios that a trainer computes from them.

    Attributes:
        temperature: the sampling temperature; 0 always takes the likeliest token.
        top_p: sample from the smallest set of tokens with this total probability; 1 for all.
        top_k: sample from this many of the likeliest tokens; 0 for all.
        max_tokens: maximum length of the response in tokens; None for the engine's own limit.
        seed: the seed of the engine's random number generator, if the engine supports seeds.
        stop: strings at which the engine stops generating.
        extra: additional request fields, passed to the engine unchanged.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InvalidValue(f"temperature is {self.temperature!r}", hint="give 0 or more")
        if not 0 < self.top_p <= 1:
            raise InvalidValue(f"top_p is {self.top_p!r}", hint="give more than 0 and at most 1")
        if self.top_k < 0:
            raise InvalidValue(f"top_k is {self.top_k!r}", hint="give 1 or more, or 0 for all tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidValue(f"max_tokens is {self.max_tokens!r}", hint="give 1 or more")


@dataclass(slots=True)
class QueueTime:
    """A clock for the time that one request has waited in queues. It can be read while the request still waits.

    The model that completes the request calls :meth:`begin` and :meth:`end`, from any thread. An agent's time limit
    does not include this time.
    """

    _total: float = 0.0
    _since: float | None = None

    def begin(self) -> None:
        """Start the clock, because the request now waits in a queue."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Stop the clock; do nothing if it does not run."""
        if self._since is not None:
            self.add(time.monotonic() - self._since)
            self._since = None

    def add(self, seconds: float) -> None:
        """Add queue time that the server has reported with its response."""
        self._total += seconds

    @property
    def seconds(self) -> float:
        """The seconds waited so far."""
        since = self._since  # read first: if end() runs now, the wait may count twice, but is never lost
        return self._total + (0.0 if since is None else time.monotonic() - since)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a model.

    Attributes:
        messages: the conversation so far.
        tools: the tools on offer, as JSON schemas in OpenAI's format.
        sampling: the sampling options.
        session: the name of the rollout. A router can use it to send all requests of a rollout to the engine that has
            cached the conversation.
        queue: the clock for the time that the request waits before the engine reads it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    sampling: Sampling = Sampling()
    session: str = ""
    queue: QueueTime = field(default_factory=QueueTime, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of one response, exactly as the engine reported them.

    Attributes:
        prompt: ids of the prompt's tokens (``array('i')``).
        sampled: ids of the sampled tokens, including the token that ended the response (``array('i')``).
        logprobs: natural logarithms of the sampled tokens' probabilities (``array('d')``).
        versions: the versions of the weights that sampled the tokens, run-length encoded as pairs of a version and a
            number of tokens; empty if unknown.
    """

    prompt: array[int]
    sampled: array[int]
    logprobs: array[float]
    versions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.logprobs):
            raise InvalidValue(
                f"the response has {len(self.sampled)} sampled tokens, but {len(self.logprobs)} log-probabilities",
                reason="the engine does not report both for every token",
            )
        if self.versions and sum(count for _, count in self.versions) != len(self.sampled):
            raise InvalidValue(f"the policy versions {self.versions} are not of {len(self.sampled)} sampled tokens")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts of a response.

    Attributes:
        prompt: tokens of the prompt.
        completion: sampled tokens.
        cached: tokens of the prompt that came from the engine's cache.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's response.

    Attributes:
        message: the response's message.
        finish_reason: ``stop``, ``length`` (truncated) or ``tool_calls``.
        usage: the token counts.
        tokens: the token ids and log-probabilities; None if the engine does not report them.
        cost: the cost in US dollars, computed from the model's prices.
        seconds: seconds from the request to the response, including failed tries.
        tries: the number of tries.
        model: the model name that the engine reports.
    """

    message: Message
    finish_reason: FinishReason
    usage: TokenUsage = TokenUsage()
    tokens: Tokens | None = None
    cost: float = 0.0
    seconds: float = 0.0
    tries: int = 1
    model: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled response, as token ids.

    Attributes:
        tokens: the ids of prompt and response, and log-probabilities under the distribution that was sampled from.
        finish_reason: ``stop`` or ``length``.
        cached: tokens of the prompt that came from the engine's cache.
        cost: the cost in US dollars.
        tries: the number of tries.
    """

    tokens: Tokens
    finish_reason: FinishReason
    cached: int = 0
    cost: float = 0.0
    tries: int = 1


class Model(Protocol):
    """A language model. One instance serves many concurrent rollouts on one event loop."""

    @property
    def name(self) -> str:
        """The model's name in logs and trajectories."""
        ...

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation.

        Raises:
            ModelUnavailable: all retries failed.
            BadAnswer: the response is malformed.
            ContextExceeded: the conversation exceeds the model's context.
            BudgetExceeded: the budget is spent.
            ModelRefused: the server rejects the request.
        """
        ...

    async def close(self) -> None:
        """Release connections and processes; further calls do nothing."""
        ...


def prompt_tokens(model: Model, request: Request) -> int | None:
    """Return the number of tokens of a request's prompt, or None if the model cannot count them before sampling.

    A model that can count them has a method ``prompt_tokens(request)``.
    """
    count: Callable[[Request], int | None] | None = getattr(model, "prompt_tokens", None)
    return None if count is None else count(request)


def seed_of(*parts: object) -> int:
    """Hash the string forms of the parts to a seed below 2**63, which is the same in every process."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class SeededModel:
    """Wrap a model, so that each response is sampled with a seed derived from the rollout's seed and the turn.

    Attributes:
        model: the wrapped model.
        seed: the rollout's seed.
    """

    model: Model
    seed: int

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    def prompt_tokens(self, request: Request) -> int | None:
        """Return the number of tokens of a request's prompt (:func:`prompt_tokens`)."""
        return prompt_tokens(self.model, request)

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`.Model.complete`)."""
        turn = sum(message.role == "assistant" for message in request.messages)
        sampling = replace(request.sampling, seed=seed_of(self.seed, turn))
        return await self.model.complete(replace(request, sampling=sampling))

    async def close(self) -> None:
        """Do nothing: the owner of the wrapped model closes it."""
