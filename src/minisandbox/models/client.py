"""A client for the chat completions API of vLLM, SGLang, llama.cpp, OpenAI and compatible servers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from minisandbox.errors import BadAnswer, InvalidValue, ModelError, ModelRefused, ModelUnavailable
from minisandbox.models.dialect import (
    NO_TOKENS,
    PROBE,
    RequestBody,
    TokensWanted,
    distribution_of,
    is_processed,
    read_answer,
    read_queue_time,
    read_usage,
    reasoning_field,
    request_fields,
)
from minisandbox.models.http import Again, Answer, Failed, Timeouts, Transport, clean, error_in, failure_of
from minisandbox.models.metering import Budget, Meter, Prices
from minisandbox.models.protocol import Completion, QueueTime, Request, Sample, Sampling, Tokens
from minisandbox.redaction import REPEATS_KEY, answer_repeats_key, contains_key

T = TypeVar("T", bound=Completion | Sample)

_LOG = logging.getLogger("minisandbox.models")
# The maximum retries after a failure that will probably repeat, and the failed tries of a request before a warning.
_SELDOM = 2
_OUTAGE = 3
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_LONGEST_WAIT = 600.0
LARGEST_ANSWER = 8 * 1024 * 1024
_SHOWN = 200
_TOKENS_TAKE = 8  # a response with token ids may be this many times as large as its text


class OpenAIModel:
    """A model behind a chat completions API. A run sends all its requests through one instance, on one event loop.

    The client retries transient failures (429, 5xx, lost connections) up to ``retries`` times, with exponential
    backoff. It retries failures that will probably repeat (timeouts, malformed responses) twice. It does not retry a
    request that the server rejects.

    Args:
        model: the model's name at the server.
        api_base: the API's address: ``http://localhost:8000/v1``.
        api_key: the server's key; "" for a server without keys. Errors, records and ``repr`` never contain the key:
            a response that contains a key of 20 characters or more is rejected.
        tokens: whether to request token ids and log-probabilities (``yes``, ``auto``, ``no``).
        timeouts: the time limits of one try.
        retries: retries after transient failures.
        gate: limits the concurrency and the rate of tries; None for 256 concurrent tries.
        meter: the prices of tokens, and the run's budget.
        largest: maximum bytes of a response's text.

    Attributes:
        disconnects: the number of tries that got no response. After each of them, the address may belong to another
            server.
    """

    def __init__(
        self,
        model: str,
        api_base: str,
        *,
        api_key: str = "",
        tokens: TokensWanted = "auto",
        timeouts: Timeouts | None = None,
        retries: int = 8,
        gate: Gate | None = None,
        meter: Meter | None = None,
        largest: int = LARGEST_ANSWER,
    ) -> None:
        if retries < 0:
            raise InvalidValue(f"retries is {retries!r}", hint="give 0 or more")
        self._model = model
        self._key = check_key(api_key)
        self._tokens: TokensWanted = tokens
        self._retries = retries
        self._gate = gate or Gate(256)
        self._turns = Turns()
        self._meter = meter or Meter(Prices(), Budget())
        self._largest = largest
        bound = largest if tokens == "no" else largest * _TOKENS_TAKE
        self._transport = Transport(api_base, self._key, timeouts or Timeouts(), bound)
        self._left_out: frozenset[str] = frozenset()
        self._length_field = "max_tokens"
        self._probing = asyncio.Lock()
        self._processed: dict[str, bool] = {}
        self._reasoning_field = "reasoning_content"
        self._outage = False
        self.disconnects = 0

    def __repr__(self) -> str:
        return f"OpenAIModel({self._model!r} at {self._transport.server!r})"

    @property
    def name(self) -> str:
        """The model's name at the server."""
        return self._model

    @property
    def server(self) -> str:
        """The server's host and port, for messages."""
        return self._transport.server

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`Model.complete`)."""
        completion = await self._answer(request)
        if completion.tokens is None or await self._match_sampling(request.sampling):
            return completion
        if self._tokens == "yes":
            raise raw_logprobs(self.server)
        return replace(completion, tokens=None)

    async def _match_sampling(self, sampling: Sampling) -> bool:
        """Return whether log-probabilities match the sampled distribution; probe the server once per kind."""
        kind = distribution_of(sampling)
        if kind == "model":
            return True

        async def sample(probe: Sampling) -> Tokens | None:
            return (await self._answer(Request(PROBE, sampling=probe))).tokens

        async with self._probing:
            if kind not in self._processed:
                self._processed[kind] = await is_processed(sample, kind)
                if not self._processed[kind] and self._tokens != "yes":
                    _LOG.warning("%s; token ids are discarded", raw_logprobs(self.server))
        return self._processed[kind]

    async def _answer(self, request: Request) -> Completion:
        """Complete a conversation, with retries."""
        began = time.monotonic()
        fields = request_fields(request, self._model, self._tokens, reasoning_field=self._reasoning_field)
        read = partial(read_answer, largest=self._largest)
        completion = await self.post("/chat/completions", fields, read, session=request.session, queue=request.queue)
        return replace(completion, seconds=time.monotonic() - began)

    async def post(
        self,
        path: str,
        fields: RequestBody,
        read: Callable[[object], T],
        *,
        session: str = "",
        queue: QueueTime | None = None,
    ) -> T:
        """Send a request, with retries; return the parsed response, with its cost and number of tries.

        Args:
            path: the path below the API's address.
            fields: the request's fields.
            read: parses the response's JSON; may raise BadAnswer, which is retried, and ModelRefused, which is not.
            session: the name of the rollout.
            queue: the clock for the time that the request waits.

        Raises:
            ModelError: all retries failed, or a retry cannot help.
        """
        call = _Call(self._left_out, self._length_field, queue or QueueTime())
        began = time.monotonic()
        while True:
            try:
                response = await self._try(path, fields, session, read, call)
            except Failed as error:
                failed = error
            else:
                self._settle(call)
                self._outage = False
                return replace(response, cost=call.cost, tries=call.tries)
            # _pause raises outside the except block, because a chained exception could contain the key
            if not self._adapt(failed, fields, call):
                pause = self._pause(failed, call, time.monotonic() - began)
                _LOG.info("%s; again in %.1f s", failed.error.what, pause)
                if sum(call.failures.values()) == _OUTAGE and not self._outage:  # warn once for all requests
                    self._outage = True
                    _LOG.warning("%s, %d times in a row; trying on for some minutes", failed.error.what, _OUTAGE)
                await asyncio.sleep(pause)

    async def models(self) -> list[dict[str, object]]:
        """Return the models that the server lists, or an empty list if the server cannot be reached."""
        try:
            answer = await self._transport.send("/models")
            listed = json.loads(answer.body)["data"] if answer.status == 200 else []
            return [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]
        except (Failed, ValueError, KeyError, TypeError, RecursionError):
            return []  # the first completion request will report the failure

    async def close(self) -> None:
        """Close the connections; further calls do nothing."""
        await self._transport.close()

    async def _try(self, path: str, fields: RequestBody, session: str, read: Callable[[object], T], call: _Call) -> T:
        await self._turns.take()
        body = call.body(fields)
        data = json.dumps(body).encode()
        call.queue.begin()
        async with self._gate.passage():
            call.queue.end()
            self._meter.budget.check()
            call.tries += 1
            try:
                answer = await self._transport.send(path, data, session)
            except Failed:
                self.disconnects += 1
                raise
        if answer.status != 200:
            raise self._refusal(answer)
        await self._turns.take()
        response = self._parsed(answer, call, read)
        if isinstance(response, Completion) and "return_token_ids" in body and response.tokens is None:
            self._without_tokens(call)
        return response

    def _parsed(self, answer: Answer, call: _Call, read: Callable[[object], T]) -> T:
        try:
            # Parse on the event loop: json holds the interpreter lock, so a thread would not help.
            # Decode as json decodes bytes, because the search for the key must see the same text as the parser.
            text = answer.body.decode(json.detect_encoding(answer.body), "surrogatepass")
            body = json.loads(text)
        except (ValueError, RecursionError):
            # redact the key before truncating, because half a key would not be recognised
            beginning = clean(answer.body[:4096].decode("utf-8", "replace"), self._key)[:_SHOWN]
            error = BadAnswer(f"{self._transport.server} sent malformed JSON: {beginning!r}")
            raise Failed(error, "seldom") from None
        if refusal := error_in(body):
            raise self._refusal(replace(answer, status=refusal[0], body=refusal[1]))
        call.cost += self._meter.charge(read_usage(body))
        call.queue.add(read_queue_time(body))
        self._reasoning_field = reasoning_field(body) or self._reasoning_field
        return self._read(body, text, read)

    def _read(self, body: object, text: str, read: Callable[[object], T]) -> T:
        """Parse a response; reject it if it contains the API key, because responses are recorded."""
        server = self._transport.server
        if answer_repeats_key(text, self._key):
            error = BadAnswer(
                f"{server} repeats the API key in its response, which is rejected",
                reason="the server, or a proxy before it, sends its input back",
                hint="look at the server's raw responses and its logs: the key may be there too",
            )
            raise Failed(error, "seldom")
        try:
            return read(body)
        except ModelRefused as error:
            raise Failed(error.about(server), "never") from None
        except BadAnswer as error:
            malformed = error.about(server)
        if contains_key(text, self._key):  # the error may quote a part of the key, which redaction would miss
            malformed = BadAnswer(f"{server} sent a malformed response: {REPEATS_KEY}")
        raise Failed(malformed, "seldom")

    def _without_tokens(self, call: _Call) -> None:
        """Handle a response without the requested token ids: fail if they are required, else stop requesting them."""
        if self._tokens == "yes":
            problem = f"{self._transport.server} reports no token ids of {self._model!r}"
            raise Failed(ModelRefused(problem, hint=NO_TOKENS), "never")
        call.left_out |= {"logprobs", "top_logprobs", "return_token_ids"}

    def _refusal(self, answer: Answer) -> Failed:
        failed = failure_of(
            answer.status,
            answer.headers,
            answer.body,
            server=self._transport.server,
            model=self._model,
            secret=self._key,
        )
        if answer.status == 429 and failed.after:
            self._gate.shut(min(failed.after, _LONGEST_WAIT))
        return failed

    def _adapt(self, failed: Failed, fields: RequestBody, call: _Call) -> bool:
        """Leave out the optional fields that the server rejected; return whether the request changed."""
        if not isinstance(failed.error, ModelRefused) or not failed.named:
            return False
        new_name = "max_completion_tokens"
        if new_name in failed.named and "max_tokens" in fields.needed and call.length_field != new_name:
            call.length_field = new_name
            return True
        refused = fields.refused(failed.named, call.left_out)
        call.left_out |= refused
        if self._tokens == "yes" and not refused and "logprobs" in failed.named:
            failed.error.hint = NO_TOKENS
        return bool(refused)

    def _settle(self, call: _Call) -> None:
        """Remember the rejected fields for further requests, once the server has accepted a request without them."""
        new = call.left_out - self._left_out
        if new:
            if "return_token_ids" in new:
                _LOG.warning("%s reports no token ids: its responses cannot be trained on", self._transport.server)
            if engine := sorted(new - {"logprobs", "top_logprobs", "return_token_ids"}):
                _LOG.warning("%s does not support %s: its defaults apply", self._transport.server, ", ".join(engine))
        self._left_out |= call.left_out
        self._length_field = call.length_field

    def _pause(self, failed: Failed, call: _Call, seconds: float) -> float:
        """Return the seconds until the next try.

        Raises:
            ModelError: all retries failed, or the server asks to wait too long.
        """
        call.failures[failed.again] = call.failures.get(failed.again, 0) + 1
        allowed = {"often": self._retries, "seldom": min(_SELDOM, self._retries), "never": 0}[failed.again]
        failures = call.failures[failed.again]
        if failures > allowed:
            raise _with_tries(failed.error, call.tries, seconds)
        if failed.after is not None:
            if failed.after > _LONGEST_WAIT:
                error = ModelUnavailable(f"{failed.error.what}; it asks to wait {failed.after:.0f} s")
                raise _with_tries(error, call.tries, seconds)
            return spread(failed.after)
        longest = min(_FIRST_PAUSE * 2.0 ** (failures - 1), _LONGEST_PAUSE)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


@dataclass(slots=True)
class _Call:
    """The state of one request across its tries.

    Attributes:
        left_out: the optional fields that the server rejected.
        length_field: the server's name for the field with the maximum length of the response.
        queue: the clock for the time that the request waits.
        tries: the number of tries so far.
        cost: the cost of all tries so far, in US dollars.
        failures: the number of failed tries by kind.
    """

    left_out: frozenset[str]
    length_field: str
    queue: QueueTime = field(default_factory=QueueTime)
    tries: int = 0
    cost: float = 0.0
    failures: dict[Again, int] = field(default_factory=dict)

    def body(self, fields: RequestBody) -> dict[str, object]:
        """Return the request's JSON body."""
        body = fields.without(self.left_out)
        if "max_tokens" in body:
            body[self.length_field] = body.pop("max_tokens")
        return body


def raw_logprobs(server: str) -> ModelRefused:
    """Return the error for a server that reports log-probabilities of another distribution than the sampled one."""
    return ModelRefused(
        f"{server} reports log-probabilities of the raw model, not of the distribution that it samples from",
        hint="start vLLM with --logprobs-mode processed_logprobs, or sample with temperature 1 without top_p and top_k "
        "(SGLang's log-probabilities include the temperature, but not top_p and top_k)",
    )


def _with_tries(error: ModelError, tries: int, seconds: float) -> ModelError:
    if tries > 1:
        error.what += f" (try {tries}, after {seconds:.0f} s)"
    return error


def check_key(key: str) -> str:
    """Return an API key without surrounding white space.

    Raises:
        InvalidValue: the key has characters other than printable ASCII. The message does not show the key.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidValue("the API key has characters other than printable ASCII", hint="check its variable")
    return key


_SPREAD = 0.1  # jitter, so that waiting requests do not all start at the same moment


class Gate:
    """Limit the concurrency and the rate of tries, over all requests of a run.

    Args:
        concurrency: maximum concurrent tries.
        per_minute: maximum tries started per minute, evenly spaced; None for no limit.
    """

    def __init__(self, concurrency: int, per_minute: float | None = None) -> None:
        if concurrency < 1:
            raise InvalidValue(f"concurrency is {concurrency!r}", hint="give 1 or more")
        if per_minute is not None and not per_minute > 0:
            raise InvalidValue(f"per_minute is {per_minute!r}", hint="give a positive number, or None for no limit")
        self._slots = asyncio.Semaphore(concurrency)
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._closed_until = 0.0

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold the slot during the block."""
        async with self._slots:
            turn = max(time.monotonic(), self._next)
            self._next = turn + self._gap
            while (wait := max(turn, self._closed_until) - time.monotonic()) > 0:
                await asyncio.sleep(wait if turn >= self._closed_until else spread(wait))
            yield

    def shut(self, seconds: float) -> None:
        """Delay all further tries by a number of seconds, because the server asked one request to wait."""
        self._closed_until = max(self._closed_until, time.monotonic() + seconds)


class Turns:
    """Admit one task per turn of the event loop: parsing a hundred responses in one turn would block it for 0.1 s."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Wait for this task's turn."""
        async with self._lock:
            await asyncio.sleep(0)


def spread(seconds: float) -> float:
    """Return a duration that is randomly increased by up to a tenth."""
    return seconds * random.uniform(1.0, 1.0 + _SPREAD)  # noqa: S311 - jitter, not a secret
