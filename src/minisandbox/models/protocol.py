"""What a model is: something that answers a conversation, and says which tokens it read and sampled."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from minisandbox.errors import InvalidValue

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants called.

    Attributes:
        id: what the answer refers to.
        name: the tool.
        arguments: JSON, as it was sampled: it may be no JSON at all.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in OpenAI's terms.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: its text.
        tool_calls: of an assistant's message: the tools it wants called.
        tool_call_id: of a tool's message: the call that it answers.
        reasoning: of an assistant's message: what the engine parsed off as its thoughts; sent back as it came.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""

    def to_json(self) -> dict[str, object]:
        """Return it as the chat completions API takes it."""
        body: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            body["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in self.tool_calls
            ]
        if self.tool_call_id is not None:
            body["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            body["reasoning_content"] = self.reasoning
        return body

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Read what the chat completions API gives.

        Raises:
            InvalidValue: it is no such message.
        """
        if not isinstance(body, Mapping):
            raise InvalidValue(f"a message is {type(body).__name__}, not an object")
        role = body.get("role", "assistant")
        if role not in _ROLES:
            raise InvalidValue(f"a message's role is {role!r}", hint=f"one of {', '.join(_ROLES)}")
        calls = body.get("tool_calls") or ()
        if not isinstance(calls, list | tuple):
            raise InvalidValue("a message's tool_calls are not a list")
        answers = body.get("tool_call_id")
        return cls(
            role,
            _text(body.get("content")),
            tuple(_tool_call(one) for one in calls),
            answers if isinstance(answers, str) else None,
            # vLLM names the field "reasoning" since 0.12, "reasoning_content" before
            _text(body.get("reasoning_content") or body.get("reasoning")),
        )


def _tool_call(body: object) -> ToolCall:
    function = body.get("function") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(function, Mapping):
        raise InvalidValue("a tool call names no function")
    parts = (body.get("id") or "", function.get("name"), function.get("arguments") or "")
    if not all(isinstance(part, str) for part in parts):
        raise InvalidValue("a tool call's id, name or arguments are not texts")
    return ToolCall(*map(str, parts))


def _text(content: object) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise InvalidValue("a message's content is no text", hint="pictures and sounds are not supported")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is drawn.

    With what differs from the defaults here, captured log-probabilities are those of another distribution than the
    model's own, and a trainer's ratios mean something else.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: the smallest set of tokens with this much probability is sampled from; 1 for all.
        top_k: as many of the likeliest tokens are sampled from; 0 for all.
        max_tokens: the answer's length at most, in tokens; None: the engine's own bound.
        seed: of the engine's random numbers, where it has any.
        stop: texts that end the answer.
        extra: further fields of the request, as the engine knows them.
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
            raise InvalidValue(f"temperature {self.temperature!r}", hint="give 0 or more")
        if not 0 < self.top_p <= 1:
            raise InvalidValue(f"top_p {self.top_p!r}", hint="give more than 0, at most 1")
        if self.top_k < 0:
            raise InvalidValue(f"top_k {self.top_k!r}", hint="give 1 or more, or 0 for all tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidValue(f"max_tokens {self.max_tokens!r}", hint="give 1 or more")


@dataclass(frozen=True, slots=True)
class Request:
    """What a model is asked.

    Attributes:
        messages: the conversation so far.
        tools: what it may call, as JSON schemas in OpenAI's layout.
        sampling: how the answer is drawn.
        session: the rollout that asks; the same for all of its requests, so that engines find their caches.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    sampling: Sampling = Sampling()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one answer, exactly as the engine that sampled them has them.

    Attributes:
        prompt: ids of what it read (``array('i')``).
        sampled: ids of what it sampled, the token that ended the answer included (``array('i')``).
        logprobs: natural logarithms of the sampled tokens' probabilities, one each (``array('d')``).
    """

    prompt: array[int]
    sampled: array[int]
    logprobs: array[float]

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.logprobs):
            raise InvalidValue(
                f"{len(self.sampled)} tokens were sampled, and {len(self.logprobs)} log-probabilities came",
                reason="the engine does not report both for every token",
            )


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """How many tokens an answer took.

    Attributes:
        prompt: tokens read.
        completion: tokens sampled.
        cached: tokens of the prompt that the engine had seen before.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer.

    Attributes:
        message: the answer itself.
        finish_reason: ``stop``, ``length`` (it was cut off) or ``tool_calls``.
        usage: tokens that it took.
        tokens: which they were; None from an engine that does not say.
        cost: US dollars, by the price list that the model was given.
        seconds: from the request to the answer, tries that failed included.
        tries: how often it was asked for.
        model: the name that the engine gives itself.
    """

    message: Message
    finish_reason: FinishReason
    usage: TokenUsage = TokenUsage()
    tokens: Tokens | None = None
    cost: float = 0.0
    seconds: float = 0.0
    tries: int = 1
    model: str = ""


class Model(Protocol):
    """What an agent asks for its next action. One serves many rollouts at once, all on one event loop."""

    @property
    def name(self) -> str:
        """What people, logs and trajectories call it."""
        ...

    async def complete(self, request: Request) -> Completion:
        """Answer a conversation.

        Raises:
            ModelUnavailable: no answer came, however often it was asked for.
            BadAnswer: what came is no answer.
            ContextExceeded: the conversation is longer than the model reads.
            BudgetExceeded: what the answer would cost is no longer there.
            ModelRefused: the request is wrong, or not allowed.
        """
        ...

    async def close(self) -> None:
        """Let go of connections and processes; calling it again does nothing."""
        ...
