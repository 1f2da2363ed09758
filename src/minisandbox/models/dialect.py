"""Convert requests and responses to and from chat completions JSON, including vLLM's fields for token ids."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, get_args

from minisandbox.errors import BadAnswer, InvalidValue, ModelRefused
from minisandbox.models.protocol import (
    Completion,
    FinishReason,
    Message,
    Request,
    Sample,
    Sampling,
    Tokens,
    TokenUsage,
    ToolCall,
)

TokensWanted = Literal["no", "auto", "yes"]
"""Whether to request token ids. ``yes`` requires them; ``auto`` accepts an engine that does not report them."""

TOKEN_FIELDS: Mapping[str, object] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
"""Request fields for token ids and log-probabilities. vLLM returns log-probabilities only with ``top_logprobs``."""

Distribution = Literal["model", "scaled", "truncated"]
"""The sampled distribution: the model's own, scaled by a temperature, or truncated by top_p or top_k."""

PROBE = (Message("user", "Name any word."),)
"""A conversation to test whether a server reports log-probabilities of the raw model."""

NO_TOKENS = (
    "use vLLM 0.10.2 or SGLang 0.5.23 or later, or --tokens no; responses without token ids cannot be trained on"
)


def distribution_of(sampling: Sampling) -> Distribution:
    """Return the kind of a request's distribution. Log-probabilities at temperature 0 are those of the model itself."""
    if sampling.temperature == 0 or (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0):
        return "model"
    return "scaled" if (sampling.top_p, sampling.top_k) == (1, 0) else "truncated"


async def is_processed(sample: Callable[[Sampling], Awaitable[Tokens | None]], kind: Distribution) -> bool:
    """Return whether a server reports log-probabilities of the distribution that it samples from.

    The first test samples with ``top_k`` 1. Only one token is possible, so its log-probability must be 0.

    SGLang's log-probabilities include the temperature, but not ``top_k``. So for ``scaled``, a second test samples at
    temperature 0.01. Log-probabilities that include the temperature are then nearly 0, while those of the raw model
    are about the same as at temperature 0.

    Args:
        sample: samples a response to a fixed prompt with the given options, and returns its tokens.
        kind: the kind of distribution that requests sample from.
    """
    tokens = await sample(Sampling(top_k=1, max_tokens=4))
    if tokens is None or min(tokens.logprobs) > -1e-4:
        return True
    if kind == "truncated":
        return False
    greedy = await sample(Sampling(temperature=0, max_tokens=8))
    cold = await sample(Sampling(temperature=0.01, max_tokens=8))
    if greedy is None or cold is None:
        return False
    # Compare means: where two tokens are equally likely, the responses continue differently.
    return fmean(cold.logprobs) > fmean(greedy.logprobs) / 2


# Set these fields explicitly: engines have their own defaults (vLLM reads the model's generation_config.json), which
# would change the distribution that Sampling describes.
_NEUTRAL: Mapping[str, object] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_OURS = frozenset({"model", "messages", "tools", "n", "stream", *TOKEN_FIELDS})
_FINISH: Mapping[object, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
_LONGEST_NAME = 200
_MOST_TOKENS = 1 << 31  # a larger count would overflow arrays and database columns


_FORCING = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def constraint_in(body: Mapping[str, object]) -> str | None:
    """Return the name of the request field that constrains the sampling, or None.

    With a constraint, an engine reports log-probabilities of the constrained distribution. They differ by up to 19 nats
    from the model's own log-probabilities, which a trainer computes.
    """
    if body.get("tool_choice") not in (None, "auto", "none"):
        return "tool_choice"
    how = body.get("response_format")
    if isinstance(how, Mapping) and how.get("type") != "text":
        return "response_format"
    return next((name for name in _FORCING if body.get(name) is not None), None)


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestBody:
    """The body of a request, split into required fields and fields that can be left out if the server rejects them.

    Attributes:
        needed: the required fields.
        optional: the fields that repeat a default value or request an optional feature.
    """

    needed: dict[str, object]
    optional: dict[str, object]

    def without(self, names: Iterable[str]) -> dict[str, object]:
        """Return the body without these optional fields."""
        optional = {name: value for name, value in self.optional.items() if name not in set(names)}
        return {**optional, **self.needed}

    def refused(self, text: str, left_out: frozenset[str]) -> frozenset[str]:
        """Find the optional fields that the server rejected, from its error response.

        A server that rejects one of vLLM's fields does not support the others either, so they are returned together.

        Args:
            text: the error response.
            left_out: the fields that the request has already left out.

        Returns:
            The further fields to leave out; empty if the error names none.
        """
        present = self.optional.keys() - left_out
        refused = {name for name in present if name in text}
        if refused & {*_NEUTRAL, "return_token_ids"}:
            refused |= {*_NEUTRAL, *TOKEN_FIELDS} & present
        elif refused & TOKEN_FIELDS.keys():
            refused |= TOKEN_FIELDS.keys() & present
        return frozenset(refused)


def request_fields(
    request: Request, model: str, tokens: TokensWanted, *, reasoning_field: str = "reasoning_content"
) -> RequestBody:
    """Convert a request to fields of the chat completions API.

    Args:
        request: the request.
        model: the model's name at the server.
        tokens: whether to request token ids.
        reasoning_field: the server's name for the reasoning in messages.

    Raises:
        InvalidValue: ``Sampling.extra`` has a reserved field, or constrains the sampling although tokens are required.
    """
    sampling = request.sampling
    if clash := sorted(_OURS & sampling.extra.keys()):
        raise InvalidValue(f"Sampling.extra has {', '.join(clash)}", hint="leave it out: the request sets it")
    constraint = constraint_in(sampling.extra)
    if constraint is not None and tokens == "yes":
        raise InvalidValue(
            f"{constraint} cannot be combined with tokens=yes",
            reason="the server's log-probabilities would be of the constrained distribution, and not trainable",
            hint=f"leave out {constraint}, or give tokens=no",
        )
    messages = [message.to_json(reasoning_field) for message in request.messages]
    needed: dict[str, object] = {"model": model, "messages": messages}
    if request.tools:
        needed["tools"] = [dict(tool) for tool in request.tools]
    body = _sampling_fields(needed, sampling)
    if tokens != "no" and constraint is None:
        (body.needed if tokens == "yes" else body.optional).update(TOKEN_FIELDS)
    return body


def completion_fields(prompt: Sequence[int], sampling: Sampling, model: str, ends: Iterable[int]) -> RequestBody:
    """Return the fields of a completions request (``/v1/completions``), whose prompt is a list of token ids.

    Args:
        prompt: the ids of the prompt.
        sampling: the sampling options.
        model: the model's name at the server.
        ends: the ids that end a response.
    """
    # With "logprobs": 0, vLLM and SGLang report log-probabilities of the sampled tokens only.
    needed = {"model": model, "prompt": list(prompt), "logprobs": 0, "return_token_ids": True}
    extra = {name: value for name, value in sampling.extra.items() if name != "chat_template_kwargs"}
    return _sampling_fields({**needed, "stop_token_ids": sorted(ends)}, replace(sampling, extra=extra))


def _sampling_fields(needed: dict[str, object], sampling: Sampling) -> RequestBody:
    """Return a request body with the required fields and the fields of the sampling options."""
    optional: dict[str, object] = dict(_NEUTRAL)
    (needed if sampling.temperature != 1.0 else optional)["temperature"] = sampling.temperature
    (needed if sampling.top_p != 1.0 else optional)["top_p"] = sampling.top_p
    if sampling.top_k:
        needed["top_k"] = sampling.top_k
    parameters = {"max_tokens": sampling.max_tokens, "seed": sampling.seed, "stop": list(sampling.stop) or None}
    needed |= {name: value for name, value in parameters.items() if value is not None}
    needed |= sampling.extra
    return RequestBody(needed, {name: value for name, value in optional.items() if name not in needed})


def read_request(body: object) -> Request:
    """Parse a request that a server received; put unknown fields into ``Sampling.extra``.

    Raises:
        InvalidValue: the request is malformed.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
        raise InvalidValue("the request has no list of messages")
    parameters = {"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "stop"}
    neutral = _NEUTRAL.items()
    extra = {
        name: value for name, value in body.items() if name not in parameters | _OURS and (name, value) not in neutral
    }
    values = {name: value for name, value in body.items() if value is not None}
    stop = values.get("stop", ())
    try:
        sampling = Sampling(
            temperature=float(values.get("temperature", 1.0)),
            top_p=float(values.get("top_p", 1.0)),
            top_k=max(int(values.get("top_k", 0)), 0),
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            seed=body.get("seed"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            extra=extra,
        )
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"the request's sampling options are invalid: {error}") from error
    return Request(tuple(map(Message.from_json, body["messages"])), tuple(body.get("tools") or ()), sampling)


def wants_tokens(body: Mapping[str, object]) -> bool:
    """Return whether a request asks for token ids."""
    return body.get("return_token_ids") is True


# --- responses -------------------------------------------------------------------------------------------------------


def read_usage(body: object) -> TokenUsage:
    """Return the token counts of a response, with 0 for a missing or invalid count."""
    usage = _usage_of(body)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
    return TokenUsage(*(count if isinstance(count, int) and 0 < count <= _MOST_TOKENS else 0 for count in counts))


def read_queue_time(body: object) -> float:
    """Return the seconds that a request waited in the server's queue: ``usage.queue_time``, as Groq reports it."""
    seconds = _usage_of(body).get("queue_time")
    return float(seconds) if isinstance(seconds, int | float) and 0 < seconds < _MOST_TOKENS else 0.0


def _usage_of(body: object) -> Mapping[str, object]:
    usage = body.get("usage") if isinstance(body, Mapping) else None
    return usage if isinstance(usage, Mapping) else {}


def read_answer(body: object, largest: int | None = None) -> Completion:
    """Parse a chat completions response.

    Args:
        body: the decoded JSON body.
        largest: maximum characters of the text, reasoning and arguments together; None for no limit.

    Raises:
        BadAnswer: the response is malformed or contradicts itself.
    """
    choice = _choice(body)
    assert isinstance(body, Mapping)  # checked by _choice
    try:
        message = Message.from_json(choice.get("message"))
        tokens = _tokens(body, choice)
    except InvalidValue as error:
        raise BadAnswer(error.what, reason=error.reason, hint=error.hint) from None
    if message.role != "assistant":
        raise BadAnswer(f"the response's message has the role {message.role!r}, not 'assistant'")
    if largest is not None and _size(message) > largest:
        raise BadAnswer(f"the response has {_size(message)} characters, more than {largest}", hint="lower --max-tokens")
    usage = read_usage(body)
    _check_counts(usage, tokens)
    sampled = len(tokens.sampled) if tokens else usage.completion
    if not (sampled or message.content or message.tool_calls or message.reasoning):
        raise BadAnswer("the response is empty: no text, no tool call, no token")
    name = body.get("model")
    model = name[:_LONGEST_NAME] if isinstance(name, str) else ""
    return Completion(message, _finish_reason(choice), usage, tokens, model=model)


def _choice(body: object) -> Mapping[str, object]:
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise BadAnswer("the response has no choice", reason="the server failed, or has another API")
    return choices[0]


def _finish_reason(choice: Mapping[str, object]) -> FinishReason:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or reason not in _FINISH:
        # For instance "abort" if the engine stops or loads new weights, or "content_filter" if text was withheld.
        raise BadAnswer(f"the response ended with {str(reason)[:_LONGEST_NAME]!r}", reason="the response is incomplete")
    return _FINISH[reason]


def _size(message: Message) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.tool_calls)


def reasoning_field(body: object) -> str | None:
    """Return the name of the field that contains a response's reasoning, or None if there is no reasoning."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    names = ("reasoning", "reasoning_content")
    return next((name for name in names if isinstance(message, Mapping) and message.get(name)), None)


def read_sample(body: object) -> Sample:
    """Parse a completions response, which must contain token ids.

    Raises:
        BadAnswer: the response is malformed.
        ModelRefused: the server reports no token ids.
    """
    choice = _choice(body)
    assert isinstance(body, Mapping)  # checked by _choice
    try:
        tokens = _tokens(body, choice)
    except InvalidValue as error:
        raise BadAnswer(error.what, reason=error.reason, hint=error.hint) from None
    if tokens is None:
        raise ModelRefused("the server reports no token ids", hint=NO_TOKENS)
    if not tokens.sampled:
        raise BadAnswer("the response is empty: no token")
    return Sample(tokens, _finish_reason(choice), read_usage(body).cached)


def _tokens(body: Mapping[str, object], choice: Mapping[str, object]) -> Tokens | None:
    # vLLM's chat API returns the prompt's ids outside the choices. SGLang's returns them in each choice, and names the
    # sampled ids response_token_ids. In the completions API, both servers return both lists in the choice.
    fields = {**choice, **{name: value for name, value in body.items() if value is not None}}
    prompt, sampled = fields.get("prompt_token_ids"), fields.get("token_ids", fields.get("response_token_ids"))
    if prompt is None or sampled is None:
        return None
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        logprobs = {}
    content, numbers = logprobs.get("content") or [], logprobs.get("token_logprobs") or []
    if not (isinstance(prompt, list) and isinstance(sampled, list) and isinstance(content, list)):
        raise InvalidValue("the response's token ids or log-probabilities are not lists")
    try:
        values = array("d", numbers or [token["logprob"] for token in content])
        tokens = Tokens(array("i", prompt), array("i", sampled), values)
    except (TypeError, KeyError, OverflowError) as error:
        raise InvalidValue(f"the response's tokens are malformed: {error}") from None
    if not math.isfinite(sum(values)) or max(values, default=0.0) > 1e-3:
        wrong = next((value for value in values if not math.isfinite(value) or value > 1e-3), math.inf)
        raise InvalidValue(
            f"the response has {wrong} as a log-probability",
            reason="the engine computed NaN or infinity, or reports another number: log-probabilities are at most 0",
            hint="check the engine's log, dtype and weights",
        )
    return tokens


def _check_counts(usage: TokenUsage, tokens: Tokens | None) -> None:
    if tokens is None:
        return
    for name, counted, present in (
        ("prompt", usage.prompt, len(tokens.prompt)),
        ("completion", usage.completion, len(tokens.sampled)),
    ):
        if counted not in (0, present):
            raise BadAnswer(
                f"the response has {present} token ids for its {name}, but reports a usage of {counted}",
                reason="the engine does not return every token",
            )


def answer_body(completion: Completion, *, tokens: bool = False, number: int = 0) -> dict[str, object]:
    """Return the JSON body of a response for a server to send.

    Args:
        completion: the response.
        tokens: whether to include the token ids and log-probabilities, if the response has them.
        number: a number for the response's id.
    """
    choice: dict[str, object] = {
        "index": 0,
        "message": completion.message.to_json(),
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    usage = completion.usage
    body: dict[str, object] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": completion.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        },
    }
    if tokens and completion.tokens is not None:
        body["prompt_token_ids"] = completion.tokens.prompt.tolist()
        choice["token_ids"] = completion.tokens.sampled.tolist()
        content = [{"token": "", "logprob": value, "top_logprobs": []} for value in completion.tokens.logprobs]
        choice["logprobs"] = {"content": content}
    return body


assert set(_FINISH.values()) == set(get_args(FinishReason))


NO_JSON = "INVALID_JSON"
"""The name of the parameter that holds the text of malformed call arguments in a history."""

_INVALID = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_TOOL_NAME = 64


def for_history(message: Message, tools: Sequence[Mapping[str, object]] = ()) -> Message:
    """Return a response with well-formed tool calls, for the history of further requests.

    Models write malformed calls, and engines pass them on. In the history, a malformed call makes every further request
    fail: vLLM parses the arguments of earlier calls as JSON before it renders the chat template, and OpenAI validates
    tool names. This function replaces invalid characters of names, and wraps arguments that are not a JSON object in an
    object with one parameter.

    Args:
        message: the response.
        tools: the tools offered to the model. Their names are kept unchanged.
    """
    if not message.tool_calls:
        return message
    offered = {function.get("name") for tool in tools if isinstance(function := tool.get("function"), Mapping)}
    return replace(message, tool_calls=tuple(_well_formed(call, call.name in offered) for call in message.tool_calls))


def _well_formed(call: ToolCall, is_offered: bool) -> ToolCall:
    name = call.name if is_offered else _INVALID.sub("_", call.name)[:_LONGEST_TOOL_NAME] or "_"
    return ToolCall(call.id, name, arguments_object(call.arguments))


def arguments_object(arguments: str) -> str:
    """Return call arguments unchanged if they are a JSON object; otherwise wrap their text in an object."""
    try:
        value = json.loads(arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    return arguments or "{}" if isinstance(value, dict) else json.dumps({NO_JSON: arguments})


def _refuse(name: str) -> object:
    """Reject NaN and infinities, which Python's JSON parser accepts but engines do not."""
    raise ValueError(name)
