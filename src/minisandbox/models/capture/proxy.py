"""A proxy with OpenAI's and Anthropic's APIs for agents, which records the token ids of the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from email.utils import format_datetime, parsedate_to_datetime
from functools import partial
from typing import NamedTuple, TypeVar

from aiohttp import web

from minisandbox.errors import (
    BadAnswer,
    BudgetExceeded,
    InvalidValue,
    MiniSandboxError,
    ModelUnavailable,
    NotFound,
)
from minisandbox.models.anthropic_messages import MESSAGES
from minisandbox.models.apis import Api, new_id
from minisandbox.models.capture.captured import CaptureSession
from minisandbox.models.dialect import (
    TOKEN_FIELDS,
    answer_body,
    constraint_in,
    read_answer,
    read_usage,
    reasoning_field,
    wants_tokens,
)
from minisandbox.models.graph import TokenRow
from minisandbox.models.http import Answer, Failed, Timeouts, Transport, error_in, is_about_length
from minisandbox.models.openai_responses import RESPONSES
from minisandbox.models.protocol import Completion, Model
from minisandbox.models.serving import (
    LARGEST_REQUEST,
    EventStream,
    HttpServer,
    complete_clamped,
    count_prompt,
    error_response,
    has_key,
    key_of,
    models_response,
    read_single,
    stream_chunks,
)
from minisandbox.redaction import REPEATS_KEY, answer_repeats_key, redact

T = TypeVar("T")

_LOG = logging.getLogger("minisandbox.models")
_PREFIX = "ms-"
_FOREIGN = "key:"
"""The prefix of session names that are derived from keys without the prefix ``ms-``."""
_LONGEST_KEY = 200
_LARGEST_ANSWER = 256 * 1024 * 1024
_GONE = 499  # nginx's status for a client that disconnected
_TOO_DEEP = "the request's lists and objects are nested too deeply"
_NO_ROOM = "the request is larger than the session's remaining space"
_OBJECT_BYTES = 80
_WIDE = 5  # a non-ASCII character takes up to 4 bytes in a str, and 12 as escaped JSON
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_STATUSES: Mapping[type[MiniSandboxError], int] = {BudgetExceeded: 402, BadAnswer: 502, ModelUnavailable: 503}
_LIMITS = ("max_tokens", "max_completion_tokens")
_PASSED_ON = ("Retry-After", "retry-after-ms")


class Access(NamedTuple):
    """The base URL and API key that an agent uses instead of OpenAI's."""

    base_url: str
    key: str


@dataclass(frozen=True, slots=True)
class _Target:
    """The engine that serves a session, by its address or in this process, and the session's id at the engine."""

    engine: Transport | Model
    session: str


class _Refused(Exception):
    """A failed request, with the error response for the agent."""

    def __init__(self, response: web.Response, message: str) -> None:
        super().__init__(message)
        self.response = response


class CaptureProxy(HttpServer):
    """A proxy that captures tokens between agents and a model, or engines with vLLM's chat completions API.

    An agent's key identifies its rollout; :meth:`session` creates a key. Requests of Anthropic's Messages API and
    OpenAI's Responses API become chat completions. A model of this process gets them as :class:`.Request`, so its
    renderer tokenizes them. From an engine with an address, the proxy requests token ids and log-probabilities with
    three extra fields, and removes them from the response unless the agent requested them too.

    Captured responses in a request's history replace the agent's copies (:class:`.Responses`). If a request's limit
    exceeds the engine's context, the proxy repeats the request without the limit. For an agent that requests a stream,
    the proxy requests the whole response, then streams it to the agent. Agents never see the engine's key, and the
    engine never sees the agents' keys. The proxy does not retry, because agents do. It captures the response to each
    retry like any other response. If an agent disconnects before the engine has responded, the request is cancelled and
    its tokens are dropped; later, the response is captured although the agent may not have read all of it.

    Args:
        upstream: a model, which its owner closes; or the address of the engine's API, ``http://localhost:8000/v1``; or
            the addresses of several engines, of which each session uses one.
        api_key: the API key of the engines.
        model: the model's name at the engines; None to use the name that the agent requests.
        timeouts: the time limits of one request.
        host: the address to listen on.
        port: the port; 0 for any free port.
        address: the address for agents, if it differs from ``host``, for instance for agents on other nodes.
        open_unknown: whether an unknown key opens a new session; otherwise it is rejected.
        session_bytes: maximum bytes that one session may hold. A full session rejects requests. A request in progress
            counts as several times its size, because its parsed objects take more memory.
        admin_key: the key for reading all rows at ``/capture/rows``; "" disables that.
    """

    def __init__(
        self,
        upstream: Model | str | Sequence[str],
        *,
        api_key: str = "",
        model: str | None = None,
        timeouts: Timeouts | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        address: str = "",
        open_unknown: bool = False,
        session_bytes: int = 256 * 1024 * 1024,
        admin_key: str = "",
    ) -> None:
        super().__init__(host, port, address)
        engines = list(upstream) if isinstance(upstream, Sequence) and not isinstance(upstream, str) else [upstream]
        if not engines:
            raise InvalidValue("the capture proxy has no engine", hint="give its address: http://localhost:8000/v1")
        self._engines = [
            Transport(engine, api_key, timeouts or Timeouts(), _LARGEST_ANSWER) if isinstance(engine, str) else engine
            for engine in engines
        ]
        self._secret = api_key
        self._model = model
        self._open_unknown = open_unknown
        self._session_bytes = session_bytes
        self._admin_key = admin_key
        self._sessions: dict[str, CaptureSession] = {}
        self._targets: dict[str, _Target] = {}
        self._made = 0
        self._warned_of_constraint = False
        self._reasoning_field = "reasoning_content"
        self._route("/chat/completions", None)
        for api in (MESSAGES, RESPONSES):
            self._route(api.path, api)
        self._route("/messages/count_tokens", MESSAGES, counts=True)
        self.route("GET", "/v1/models", self._models)
        self.route("GET", "/health", self._health)
        self.route("GET", "/capture/rows", self._rows)

    def session(self, name: str = "", *, model: Model | None = None) -> Access:
        """Open a session for a rollout.

        Args:
            name: the rollout's name; if empty, a name is generated.
            model: the session's own model, which its owner closes; None for the proxy's. Its errors become errors for
                the agent: 402 for BudgetExceeded, 502 for BadAnswer, 503 for ModelUnavailable, and 400 for others.

        Returns:
            The base URL and key for the rollout's agent.
        """
        key = _PREFIX + secrets.token_urlsafe(24)
        name = name or f"session-{self._made}"
        self._open(key, name, shown=name, model=model)
        return Access(self.base_url, key)

    def captured(self, key: str) -> CaptureSession:
        """Return a session.

        Raises:
            NotFound: no session has this key.
        """
        try:
            return self._sessions[key]
        except KeyError:
            raise NotFound("no session has this key", reason="it was closed, or never opened") from None

    def rows(self, key: str) -> tuple[TokenRow, ...]:
        """Return a session's training rows so far.

        Raises:
            NotFound: no session has this key.
        """
        return self.captured(key).rows()

    def sessions(self) -> tuple[CaptureSession, ...]:
        """Return all open sessions."""
        return tuple(self._sessions.values())

    def close_session(self, key: str) -> CaptureSession:
        """Close a session: reject its key from now on, and do not capture pending responses.

        Returns:
            The session.

        Raises:
            NotFound: no session has this key.
        """
        session = self.captured(key)
        session.closed = True
        del self._sessions[key], self._targets[key]
        return session

    async def stop(self) -> None:
        """Stop listening, and close the connections to the engines; keep the sessions."""
        await super().stop()
        for engine in self._engines:
            if isinstance(engine, Transport):
                await engine.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _route(self, path: str, api: Api | None, *, counts: bool = False) -> None:
        self.route("POST", f"/v1{path}", partial(self._complete, api=api, counts=counts))

    async def _complete(self, request: web.Request, *, api: Api | None, counts: bool) -> web.StreamResponse:
        key = key_of(request)
        if key not in self._sessions:
            if not (self._open_unknown and 0 < len(key) <= _LONGEST_KEY and key.isprintable()):
                return error_response(401, "this key belongs to no session of this proxy", "authentication_error")
            # the engine sees a hash as the session's id, because the id must not reveal the agent's key
            self._open(key, self._name_of(key), shown=hashlib.sha256(key.encode()).hexdigest()[:16])
        session = self._sessions[key]
        with session.handling() as take:
            return await self._answered(request, key, api, take, counts=counts)

    async def _answered(
        self, request: web.Request, key: str, api: Api | None, take: Callable[[int], bool], *, counts: bool
    ) -> web.StreamResponse:
        session = self._sessions[key]
        began = session.elapsed
        stream = EventStream(request, api)
        try:
            body, chat = self._chat_request(await _read_body(request, session, take), api, take)
            if counts:
                return web.json_response({"input_tokens": await self._count(chat, key)})
            async with stream.pings() if body.get("stream") else nullcontext():
                answer, completion = await self._ask(chat, key, session, began)
        except _Refused as refused:
            session.fail(refused.response.status, str(refused), began)
            return await stream.fail(refused.response)
        except RecursionError:
            session.fail(400, _TOO_DEEP, began)
            return error_response(400, _TOO_DEEP, "BadRequestError")
        except asyncio.CancelledError:
            session.fail(_GONE, "the agent disconnected before the response", began)
            raise
        answer = api.answer(completion, body) if api else _for_agent(answer, body)
        if not body.get("stream"):
            return web.json_response(answer)
        return await stream.send(api.events(answer) if api else stream_chunks(answer, body))

    def _chat_request(
        self, data: bytearray, api: Api | None, take: Callable[[int], bool]
    ) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """Return a request's JSON, and the request as chat completions."""
        body = _body_of(data)
        try:
            chat = api.read(body) if api else body
        except InvalidValue as error:
            raise _refusal(400, error.what, "BadRequestError") from None
        messages = chat.get("messages")
        if not isinstance(messages, list):
            raise _refusal(400, "the request has no list of messages", "BadRequestError")
        if api is not None:
            if not take(_unpacked(data)):
                raise _full(_NO_ROOM)
            for message in messages:
                if "reasoning_content" in message:
                    message[self._reasoning_field] = message.pop("reasoning_content")
        return body, chat

    async def _count(self, chat: Mapping[str, object], key: str) -> int:
        """Return the number of tokens of a prompt, by sampling one token unless the model can count them."""
        chat = {name: value for name, value in chat.items() if name not in (*_LIMITS, "tool_choice", "response_format")}
        target = self._targets[key]
        if not isinstance(target.engine, Transport):
            model = target.engine
            return await _from_model(lambda: count_prompt(model, read_single(chat, target.session)))
        return read_usage(self._read(await self._send({**chat, "max_tokens": 1}, target.engine, target.session))).prompt

    async def _send(self, chat: Mapping[str, object], transport: Transport, session: str) -> Answer:
        """Send a request to an engine; if its token limit exceeds the context, repeat it without a limit."""
        fields = _for_engine(chat, self._model)
        unlimited = {name: value for name, value in fields.items() if name not in _LIMITS}
        try:
            response = await transport.send("/chat/completions", json.dumps(fields).encode(), session)
            is_refused = response.status != 200 and is_about_length(response.status, response.body)
            if is_refused and len(unlimited) < len(fields):
                response = await transport.send("/chat/completions", json.dumps(unlimited).encode(), session)
        except Failed as failed:
            raise _refusal(502, f"no response from the engine: {failed.error}", "upstream_error") from None
        return response

    async def _ask(
        self, request: Mapping[str, object], key: str, session: CaptureSession, began: float
    ) -> tuple[Mapping[str, object], Completion]:
        """Send a request to the model and capture the response; return the response and its first completion."""
        if session.full:
            raise _full("the session is full")
        target = self._targets[key]
        history = session.restore(request, self._reasoning_field)
        request = {**request, "messages": history.messages}
        complete = self._complete_at if isinstance(target.engine, Transport) else self._complete_in_process
        answer, completions = await complete(request, target)
        if session.closed:
            raise _refusal(401, "the session was closed", "authentication_error")
        forced = constraint_in(request)
        if forced is not None and not self._warned_of_constraint:
            self._warned_of_constraint = True
            _LOG.warning("requests have %s: their constrained samples are captured, but carry no loss", forced)
        for message, completion in completions:
            session.add(history, message, completion, began, trained=forced is None)
        self._reasoning_field = reasoning_field(answer) or self._reasoning_field
        return answer, completions[0][1]

    async def _complete_in_process(
        self, chat: Mapping[str, object], target: _Target
    ) -> tuple[Mapping[str, object], list[tuple[object, Completion]]]:
        model = target.engine
        assert not isinstance(model, Transport)
        completion = await _from_model(lambda: complete_clamped(model, read_single(chat, target.session)))
        wants_logprobs = wants_tokens(chat) or bool(chat.get("logprobs"))
        answer = answer_body(completion, tokens=wants_logprobs) | {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
        }
        return answer, [(completion.message.to_json(), completion)]

    async def _complete_at(
        self, chat: Mapping[str, object], target: _Target
    ) -> tuple[Mapping[str, object], list[tuple[object, Completion]]]:
        assert isinstance(target.engine, Transport)
        response = await self._send(chat, target.engine, target.session)
        answer = self._read(response)
        try:
            return answer, _completions(answer)
        except BadAnswer as error:
            # the error may quote a part of the key, which redact would miss
            text = response.body.decode("utf-8", "replace")
            reason = str(error) if redact(text, self._secret) == text else REPEATS_KEY
            raise _refusal(502, f"the engine's answer cannot be captured: {reason}", "upstream_error") from None

    def _read(self, response: Answer) -> Mapping[str, object]:
        """Return the body of a successful response; for an error, raise it for the agent with the API key redacted."""
        text = response.body.decode("utf-8", "replace")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = None
        error = error_in(body)
        if response.status == 200 and error is None and isinstance(body, dict):
            if answer_repeats_key(text, self._secret):
                raise _refusal(502, f"the engine answers 200: {REPEATS_KEY}", "upstream_error")
            return body
        status = response.status if response.status >= 400 else error[0] if error else 502
        redacted = redact(text, self._secret)
        if not isinstance(body, dict) or redacted == REPEATS_KEY:
            raise _refusal(
                status, f"the engine answers {response.status}: {redacted[:2000]}", "upstream_error", response.headers
            )
        headers = _pauses(response.headers)
        raise _Refused(
            web.Response(status=status, text=redacted, content_type="application/json", headers=headers), redacted
        )

    async def _models(self, request: web.Request) -> web.Response:
        return models_response(request, self._model)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        """Stream all rows, or the rows of ``?session=NAME``, as JSON Lines."""
        if not self._admin_key or not has_key(request, self._admin_key):
            return error_response(401, "this needs the proxy's admin key", "authentication_error")
        name = request.query.get("session")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for session in self.sessions():
            if name in (None, session.name):
                for row in session.to_json():
                    await response.write(json.dumps(row).encode() + b"\n")
        await response.write_eof()
        return response

    def _name_of(self, key: str) -> str:
        """Return the session name for a key: NAME for ``ms-NAME``, or a name with a prefix that avoids clashes."""
        name = key.removeprefix(_PREFIX)
        is_named = name != key and not name.startswith(_FOREIGN)
        return name if is_named and all(name != session.name for session in self.sessions()) else _FOREIGN + key

    def _open(self, key: str, name: str, shown: str, model: Model | None = None) -> None:
        self._sessions[key] = CaptureSession(name, self._session_bytes)
        self._targets[key] = _Target(model or self._engines[self._made % len(self._engines)], shown)
        self._made += 1


async def _read_body(request: web.Request, session: CaptureSession, take: Callable[[int], bool]) -> bytearray:
    """Read a request's body, within the session's remaining bytes."""
    if session.full:
        raise _full("the session is full")
    if (request.content_length or 0) > session.left:
        raise _full(_NO_ROOM)
    body = bytearray()
    async for piece in request.content.iter_any():
        if not take(len(piece)):
            raise _full(_NO_ROOM)
        body += piece
        if len(body) > LARGEST_REQUEST:
            raise _refusal(413, f"the request has more than {LARGEST_REQUEST} bytes", "BadRequestError")
    if not take(_unpacked(body)):
        raise _full(_NO_ROOM)
    return body


def _unpacked(body: bytearray) -> int:
    """Estimate the memory for parsing a body and serialising it again; never underestimate by much."""
    # Counting also the marks inside strings overestimates the objects. JSON escapes the character DEL as \u007f.
    objects = sum(body.count(mark) for mark in b",:[{")
    wide = not body.isascii() or b"\\u" in body or b"\x7f" in body
    return _OBJECT_BYTES * objects + len(body) * (_WIDE if wide else 1)


def _full(message: str) -> _Refused:
    return _refusal(400, message, "session_full")


def _body_of(data: bytearray) -> dict[str, object]:
    try:
        body = json.loads(data.decode())  # decode as UTF-8: from bytes, json would accept UTF-16, which grows fourfold
    except ValueError as error:
        raise _refusal(400, f"the request is not JSON: {error}", "BadRequestError") from None
    if not isinstance(body, dict):
        raise _refusal(400, "the request has no list of messages", "BadRequestError")
    return body


def _for_engine(request: Mapping[str, object], model: str | None) -> dict[str, object]:
    """Return the request for the engine: without streaming, and with token ids."""
    body = {name: value for name, value in request.items() if name not in ("stream", "stream_options")}
    tokens = dict(TOKEN_FIELDS) | ({"top_logprobs": request["top_logprobs"]} if request.get("top_logprobs") else {})
    return body | tokens | ({"model": model} if model is not None else {})


def _for_agent(answer: Mapping[str, object], request: Mapping[str, object]) -> dict[str, object]:
    """Return the response for the agent, without token fields that the agent did not request."""
    hidden = () if wants_tokens(request) else ("prompt_token_ids", "token_ids", "response_token_ids")
    choices = answer["choices"]
    assert isinstance(choices, list)
    hidden_logprobs = {} if request.get("logprobs") else {"logprobs": None}
    visible = [{name: value for name, value in choice.items() if name not in hidden} for choice in choices]
    body = {name: value for name, value in answer.items() if name not in hidden}
    return body | {"choices": [choice | hidden_logprobs for choice in visible]}


def _completions(answer: Mapping[str, object]) -> list[tuple[object, Completion]]:
    """Return each choice's raw message and its parsed completion."""
    choices = answer.get("choices")
    several = choices if isinstance(choices, list) else []
    if len(several) < 2:
        completion = read_answer(answer)  # raises unless there is a choice with a message
        pairs = [(several[0]["message"], completion)]
    else:  # drop the usage, because it counts all choices together
        single = {name: value for name, value in answer.items() if name != "usage"}
        completions = [read_answer({**single, "choices": [choice]}) for choice in several]
        pairs = [(choice["message"], completion) for choice, completion in zip(several, completions, strict=True)]
    if any(completion.tokens is None for _, completion in pairs):
        raise BadAnswer(
            "the response has no token ids",
            reason="the engine does not support return_token_ids",
            hint="use vLLM 0.10.2 or later, or minisandbox model serve",
        )
    return pairs


async def _from_model(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a model's work; convert its errors to errors for the agent."""
    try:
        return await work()
    except MiniSandboxError as error:
        status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 400)
        raise _refusal(status, str(error), "upstream_error" if status > 500 else "BadRequestError") from None


def _refusal(status: int, message: str, kind: str, headers: Mapping[str, str] | None = None) -> _Refused:
    response = error_response(status, message, kind)
    response.headers.update(_pauses(headers or {}))
    return _Refused(response, message)


def _pauses(headers: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's retry headers if they are plain numbers or dates; other values could leak the key."""
    values = {name: headers[name].strip() for name in _PASSED_ON if name in headers}
    return {name: value for name, value in values.items() if _NUMBER.fullmatch(value) or _is_date(value)}


def _is_date(value: str) -> bool:
    try:
        return format_datetime(parsedate_to_datetime(value), usegmt=True) == value
    except ValueError:
        return False
