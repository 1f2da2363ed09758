"""A client of the chat completions API: vLLM, SGLang, llama.cpp, OpenAI and what speaks like them."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minisandbox.errors import BadAnswer, InvalidValue, ModelError, ModelRefused, ModelUnavailable
from minisandbox.models.dialect import PROBE, Fields, TokensWanted, read_answer, read_usage, request_fields
from minisandbox.models.endpoint import Timeouts
from minisandbox.models.gate import Gate, Turns, spread
from minisandbox.models.metering import Budget, Meter, Prices
from minisandbox.models.protocol import Completion, Request, Sampling
from minisandbox.models.refusals import (
    REPEATS_KEY,
    Again,
    Failed,
    answer_repeats_key,
    clean,
    error_in,
    failure_of,
    tells_key,
)

if TYPE_CHECKING:
    from minisandbox.models.transport import Answer

_LOG = logging.getLogger("minisandbox.models")
_SELDOM = 2  # further tries after what most likely comes back the same
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_LONGEST_WAIT = 600.0
LARGEST_ANSWER = 8 * 1024 * 1024
_SHOWN = 200
_TOKENS_TAKE = 8  # bytes of JSON about the tokens of a text, for each of the text
_EXACT = 1e-4
_RAW = "{} gives log-probabilities of the raw model, not of the distribution that it samples from"
_RAW_HINT = "start vLLM with --logprobs-mode processed_logprobs, or sample with temperature 1 without top_p and top_k"
_NO_TOKENS = "vLLM 0.10.2 or later answers them; --tokens no goes without, and nothing can be trained on it"


class OpenAIModel:
    """A model behind a chat completions API. All requests of a run go through one, on one event loop.

    A try that fails is repeated: after a growing pause where that may pass (429, 5xx, lost connections), ``retries``
    times; twice where it hardly does (time-outs, answers that are none); never where the server refuses.

    Args:
        model: the name that the server knows it by.
        api_base: where the API is: ``http://localhost:8000/v1``.
        api_key: the server's key, "" for none. It is in no error, record or ``repr``: an answer that repeats one of 20
            characters or more is none.
        tokens: whether token ids and log-probabilities are asked for (``yes``, ``auto``, ``no``).
        timeouts: of one try.
        retries: further tries after failures that may pass.
        gate: how many tries at once, and how fast; 256 at once if None.
        meter: what tokens cost, and the run's budget.
        largest: bytes that an answer's text may have.
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
        # aiohttp takes a quarter of a second to load: only whoever asks a server pays for it
        from minisandbox.models.transport import Transport  # noqa: PLC0415 - see above

        if retries < 0:
            raise InvalidValue(f"{retries!r} retries", hint="give 0 or more")
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
        self._processed: bool | None = None

    def __repr__(self) -> str:
        return f"OpenAIModel({self._model!r} at {self._transport.server!r})"

    @property
    def name(self) -> str:
        """The name that the server knows it by."""
        return self._model

    async def complete(self, request: Request) -> Completion:
        """Answer a conversation (:meth:`Model.complete`)."""
        found = await self._answer(request)
        if found.tokens is None or await self._are_of_the_sampling(request.sampling):
            return found
        if self._tokens == "yes":
            raise ModelRefused(_RAW.format(self._transport.server), hint=_RAW_HINT)
        return replace(found, tokens=None)

    async def _are_of_the_sampling(self, sampling: Sampling) -> bool:
        """Whether log-probabilities are of the distribution that is sampled from; asked once, where it matters."""
        if sampling.temperature == 0 or (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0):
            return True  # the raw ones are the same
        async with self._probing:
            if self._processed is None:
                tokens = (await self._answer(PROBE)).tokens
                self._processed = tokens is None or min(tokens.logprobs) > -_EXACT
                if not self._processed and self._tokens != "yes":
                    _LOG.warning("%s; tokens are not kept; %s", _RAW.format(self._transport.server), _RAW_HINT)
        return self._processed

    async def _answer(self, request: Request) -> Completion:
        """Answer a conversation, after as many tries as it may have."""
        call = _Call(self._left_out, self._length_field)
        began = time.monotonic()
        while True:
            fields = request_fields(request, self._model, self._tokens)
            try:
                completion = await self._try(request, fields, call)
            except Failed as error:
                failed = error
            else:
                self._settle(call)
                return replace(completion, cost=call.cost, seconds=time.monotonic() - began, tries=call.tries)
            # outside of the except block, so that nothing is chained to what is raised: it may carry the key
            if not self._adapt(failed, fields, call):
                pause = self._pause(failed, call, time.monotonic() - began)
                _LOG.info("%s; again in %.1f s", failed.error.what, pause)
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections; calling it again does nothing."""
        await self._transport.close()

    async def _try(self, request: Request, fields: Fields, call: _Call) -> Completion:
        await self._turns.take()
        body = call.body(fields)
        data = json.dumps(body).encode()
        async with self._gate.passage():
            self._meter.budget.check()
            call.tries += 1
            answer = await self._transport.post(data, request.session)
        if answer.status != 200:
            raise self._refusal(answer)
        await self._turns.take()
        return self._completion(answer, call, asked="return_token_ids" in body)

    def _completion(self, answer: Answer, call: _Call, *, asked: bool) -> Completion:
        try:
            # not elsewhere than on the loop: json holds the interpreter's lock all the time
            # as json does it with bytes; what the key is looked for in has to be what was read
            text = answer.body.decode(json.detect_encoding(answer.body), "surrogatepass")
            body = json.loads(text)
        except (ValueError, RecursionError):
            # cleaned before it is cut: half of a key would not be recognised
            beginning = clean(answer.body[:4096].decode("utf-8", "replace"), self._key)[:_SHOWN]
            error = BadAnswer(f"{self._transport.server} sends what is no JSON: {beginning!r}")
            raise Failed(error, "seldom") from None
        if found := error_in(body):
            raise self._refusal(replace(answer, status=found[0], body=found[1]))
        call.cost += self._meter.charge(read_usage(body))
        completion = self._read(body, text)
        if asked and completion.tokens is None:
            self._without_tokens(call)
        return completion

    def _read(self, body: object, text: str) -> Completion:
        """Read an answer that does not repeat the key: all of it may get into records."""
        server = self._transport.server
        if answer_repeats_key(text, self._key):
            error = BadAnswer(
                f"{server} repeats the API key in its answer, which is not kept",
                reason="the server, or a proxy before it, sends back what it is sent",
                hint="look at what the server sends by itself, and at its logs: the key may be there too",
            )
            raise Failed(error, "seldom")
        try:
            return read_answer(body, self._largest)
        except BadAnswer as error:
            told = error.about(server)
        if tells_key(text, self._key):  # of which the error may have a part, cut within the key
            told = BadAnswer(f"{server} sends an answer that cannot be read: {REPEATS_KEY}")
        raise Failed(told, "seldom")

    def _without_tokens(self, call: _Call) -> None:
        """The engine has said nothing about tokens, though asked."""
        if self._tokens == "yes":
            said = f"{self._transport.server} does not tell the token ids of {self._model!r}"
            raise Failed(ModelRefused(said, hint=_NO_TOKENS), "never")
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

    def _adapt(self, failed: Failed, fields: Fields, call: _Call) -> bool:
        """Find out whether the server refuses only what the request can do without; the call leaves it out then."""
        if not isinstance(failed.error, ModelRefused) or not failed.named:
            return False
        new_name = "max_completion_tokens"
        if new_name in failed.named and "max_tokens" in fields.needed and call.length_field != new_name:
            call.length_field = new_name
            return True
        refused = fields.refused(failed.named, call.left_out)
        call.left_out |= refused
        if self._tokens == "yes" and not refused and "logprobs" in failed.named:
            failed.error.hint = _NO_TOKENS
        return bool(refused)

    def _settle(self, call: _Call) -> None:
        """Remember what the server did without, now that it has answered."""
        new = call.left_out - self._left_out
        if new:
            if "return_token_ids" in new:
                _LOG.warning("%s tells no token ids: nothing can be trained on its answers", self._transport.server)
            if engine := sorted(new - {"logprobs", "top_logprobs", "return_token_ids"}):
                _LOG.warning("%s does not take %s: its own defaults hold", self._transport.server, ", ".join(engine))
        self._left_out |= call.left_out
        self._length_field = call.length_field

    def _pause(self, failed: Failed, call: _Call, seconds: float) -> float:
        """Return how long to wait before the next try.

        Raises:
            ModelError: there is none.
        """
        call.failures[failed.again] = call.failures.get(failed.again, 0) + 1
        allowed = {"often": self._retries, "seldom": min(_SELDOM, self._retries), "never": 0}[failed.again]
        made = call.failures[failed.again]
        if made > allowed:
            raise _told(failed.error, call.tries, seconds)
        if failed.after is not None:
            if failed.after > _LONGEST_WAIT:
                error = ModelUnavailable(f"{failed.error.what}; it asks to wait {failed.after:.0f} s")
                raise _told(error, call.tries, seconds)
            return spread(failed.after)
        longest = min(_FIRST_PAUSE * 2.0 ** (made - 1), _LONGEST_PAUSE)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret: it spreads requests


@dataclass(slots=True)
class _Call:
    """One request on its way to an answer.

    Attributes:
        left_out: optional fields that it goes without.
        length_field: how the answer's length is called.
        tries: how often it was sent.
        cost: US dollars so far.
        failures: how many tries failed in each way.
    """

    left_out: frozenset[str]
    length_field: str
    tries: int = 0
    cost: float = 0.0
    failures: dict[Again, int] = field(default_factory=dict)

    def body(self, fields: Fields) -> dict[str, object]:
        """Return the request as it is sent."""
        body = fields.without(self.left_out)
        if "max_tokens" in body:
            body[self.length_field] = body.pop("max_tokens")
        return body


def _told(error: ModelError, tries: int, seconds: float) -> ModelError:
    if tries > 1:
        error.what += f" (try {tries}, after {seconds:.0f} s)"
    return error


def check_key(key: str) -> str:
    """Return a key without white space around it.

    Raises:
        InvalidValue: it cannot be one; it is not shown.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidValue("the API key has characters that no key has", hint="look at the variable that has it")
    return key
