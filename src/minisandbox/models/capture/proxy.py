"""A proxy with OpenAI's and Anthropic's APIs for agents, which records the token ids of the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import format_datetime, parsedate_to_datetime
from functools import partial
from typing import NamedTuple

from aiohttp import web

from minisandbox.errors import BadAnswer, InvalidValue, NotFound
from minisandbox.models.anthropic_messages import MESSAGES
from minisandbox.models.apis import Api
from minisandbox.models.capture.captured import CaptureSession
from minisandbox.models.dialect import (
    TOKEN_FIELDS,
    constraint_in,
    read_answer,
    read_usage,
    reasoning_field,
    wants_tokens,
)
from minisandbox.models.graph import TokenRow
from minisandbox.models.http import Answer, Failed, Timeouts, Transport, error_in, is_about_length
from minisandbox.models.openai_responses import RESPONSES
from minisandbox.models.protocol import Completion
from minisandbox.models.serving import (
    LARGEST_REQUEST,
    HttpServer,
    error_response,
    has_key,
    key_of,
    models_response,
    send_events,
    stream_of,
)
from minisandbox.redaction import REPEATS_KEY, answer_repeats_key, redact

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
_LIMITS = ("max_tokens", "max_completion_tokens")
_PASSED_ON = ("Retry-After", "retry-after-ms")


class Access(NamedTuple):
    """The base URL and API key that an agent uses instead of OpenAI's."""

    base_url: str
    key: str


@dataclass(frozen=True, slots=True)
class _Target:
    """The index of the engine that serves a session, and the id that the engine sees for the session."""

    upstream: int
    session: str


class _Refused(Exception):
    """A failed request, with the error response for the agent."""

    def __init__(self, response: web.Response, message: str) -> None:
        super().__init__(message)
        self.response = response


class CaptureProxy(HttpServer):
    """A proxy that captures tokens between agents and engines with vLLM's chat completions API.

    An agent's key identifies its rollout; :meth:`session` creates a key. The proxy does not tokenize. It requests token
    ids and log-probabilities with three extra fields, and removes them from the response unless the agent requested
    them too. Requests of Anthropic's Messages API and OpenAI's Responses API become chat completions for the engine. If
    a request's limit exceeds the engine's context, the proxy repeats the request without the limit. For an agent that
    requests a stream, the proxy requests the whole response, then streams it to the agent. Agents never see the
    engine's key, and the engine never sees the agents' keys. The proxy does not retry, because agents do. It captures
    the response to each retry like any other response.

    Args:
        upstream: the address of the engine's API, ``http://localhost:8000/v1``, or the addresses of several engines,
            of which each session uses one.
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
        upstream: str | Sequence[str],
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
        bases = [upstream] if isinstance(upstream, str) else list(upstream)
        if not bases:
            raise InvalidValue("the capture proxy has no engine", hint="give its address: http://localhost:8000/v1")
        self._upstreams = [Transport(base, api_key, timeouts or Timeouts(), _LARGEST_ANSWER) for base in bases]
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

    def session(self, name: str = "") -> Access:
        """Open a session for a rollout.

        Args:
            name: the rollout's name; if empty, a name is generated.

        Returns:
            The base URL and key for the rollout's agent.
        """
        key = _PREFIX + secrets.token_urlsafe(24)
        name = name or f"session-{self._made}"
        self._open(key, name, shown=name)
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
        for upstream in self._upstreams:
            await upstream.close()

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
        try:
            body, chat = self._chat_request(await _read_body(request, session, take), api, take)
            if counts:
                return web.json_response({"input_tokens": await self._count(chat, key)})
            answer, completion = await self._ask(chat, key, session, began)
        except _Refused as refused:
            session.fail(refused.response.status, str(refused), began)
            return refused.response
        except RecursionError:
            session.fail(400, _TOO_DEEP, began)
            return error_response(400, _TOO_DEEP, "BadRequestError")
        except asyncio.CancelledError:
            session.fail(_GONE, "the agent disconnected before the response", began)
            raise
        if api is not None:
            translated = api.answer(completion, body)
            if body.get("stream"):
                return await send_events(request, api.events(translated))
            return web.json_response(translated)
        answer = _for_agent(answer, body)
        return await stream_of(request, answer, body) if body.get("stream") else web.json_response(answer)

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
        """Return the number of tokens of a prompt, by sampling one token that is not captured."""
        chat = {name: value for name, value in chat.items() if name not in (*_LIMITS, "tool_choice", "response_format")}
        return read_usage(self._read(await self._send({**chat, "max_tokens": 1}, key))).prompt

    async def _send(self, chat: Mapping[str, object], key: str) -> Answer:
        """Send a request to the session's engine; if its token limit exceeds the context, repeat it without a limit."""
        target = self._targets[key]
        fields = _for_engine(chat, self._model)
        unlimited = {name: value for name, value in fields.items() if name not in _LIMITS}
        transport = self._upstreams[target.upstream]
        try:
            response = await transport.send("/chat/completions", json.dumps(fields).encode(), target.session)
            if len(unlimited) < len(fields) and is_about_length(response.status, response.body):
                response = await transport.send("/chat/completions", json.dumps(unlimited).encode(), target.session)
        except Failed as failed:
            raise _refusal(502, f"no response from the engine: {failed.error}", "upstream_error") from None
        return response

    async def _ask(
        self, request: Mapping[str, object], key: str, session: CaptureSession, began: float
    ) -> tuple[Mapping[str, object], Completion]:
        """Send a request to the engine and capture the response; return the response and its first completion."""
        if session.full:
            raise _full("the session is full")
        response = await self._send(request, key)
        answer = self._read(response)
        try:
            completions = _completions(answer)
        except BadAnswer as error:
            # the error may quote a part of the key, which redact would miss
            text = response.body.decode("utf-8", "replace")
            reason = str(error) if redact(text, self._secret) == text else REPEATS_KEY
            raise _refusal(502, f"the engine's answer cannot be captured: {reason}", "upstream_error") from None
        if session.closed:
            raise _refusal(401, "the session was closed", "authentication_error")
        messages = request["messages"]
        assert isinstance(messages, list)
        forced = constraint_in(request)
        if forced is not None and not self._warned_of_constraint:
            self._warned_of_constraint = True
            _LOG.warning("requests have %s: their constrained samples are captured, but carry no loss", forced)
        for message, completion in completions:
            session.add(messages, message, completion, began, trained=forced is None)
        self._reasoning_field = reasoning_field(answer) or self._reasoning_field
        return answer, completions[0][1]

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

    def _open(self, key: str, name: str, shown: str) -> None:
        self._sessions[key] = CaptureSession(name, self._session_bytes)
        self._targets[key] = _Target(self._made % len(self._upstreams), shown)
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
