"""Shared code of model servers: start and stop, API keys, error responses and streamed responses."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from aiohttp import http_exceptions, web

from minisandbox.errors import ContextExceeded, HostError, InvalidValue
from minisandbox.models import anthropic_messages
from minisandbox.models.apis import Api
from minisandbox.models.dialect import read_request
from minisandbox.models.http import is_about_length
from minisandbox.models.protocol import Completion, Model, Request, prompt_tokens

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LARGEST_REQUEST = 256 * 1024 * 1024
"""Maximum bytes of one request; a request contains the whole conversation."""

PING = 10.0
"""The seconds between two pings of a stream. Errors within the first period have an HTTP status."""

_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record is safe: aiohttp's records of malformed HTTP quote the request and so its keys."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, http_exceptions.HttpProcessingError)


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_is_ours)


class HttpServer:
    """An HTTP server on one event loop, usable as an asynchronous context manager.

    Args:
        host: the address to listen on.
        port: the port; 0 for any free port.
        address: the address for clients, if it differs from ``host``: a host name, or this node's address if ``host``
            is the wildcard address.
    """

    def __init__(self, host: str, port: int, address: str = "") -> None:
        self._host, self._port, self._address = host, port, address or host
        self._routes: list[tuple[str, str, Handler]] = []
        self._runner: web.AppRunner | None = None

    def route(self, method: str, path: str, handler: Handler) -> None:
        """Register a handler for a path, before the server starts."""
        self._routes.append((method, path, handler))

    async def start(self) -> None:
        """Start listening.

        Raises:
            HostError: the address is not available.
        """
        app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[_shape_errors, _reject_compressed])
        for method, path, handler in self._routes:
            app.router.add_route(method, path, handler)
        # cancel a handler when its client disconnects
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_LOG, auto_decompress=False
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.stop()
            raise HostError(
                f"{self._host}:{self._port} is not available", reason=error.strerror, hint="use another --port, or 0"
            ) from error
        self._port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening and cancel running requests; further calls do nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def base_url(self) -> str:
        """The base URL for clients (``api_base``)."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        """Start the server."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the server."""
        await self.stop()


def key_of(request: web.Request) -> str:
    """Return a request's API key, as a bearer token or in Anthropic's header, or an empty string."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def has_key(request: web.Request, key: str) -> bool:
    """Return whether a request has this API key; compare in constant time to prevent timing attacks."""
    return hmac.compare_digest(key_of(request).encode("utf-8", "surrogateescape"), key.encode())


def _is_anthropic(request: web.Request) -> bool:
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert routing errors to OpenAI's format, and for Anthropic's clients all errors to Anthropic's format."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        what = f"{error.reason}: {request.method} {request.path}"
        response = error_response(error.status, what, "NotFoundError" if error.status == 404 else "BadRequestError")
    if response.status < 400 or not isinstance(response, web.Response) or not _is_anthropic(request):
        return response
    body = response.body if isinstance(response.body, bytes) else b""
    message = _error_message(body)
    if is_about_length(response.status, body):
        message = f"prompt is too long: {message}"  # agents shorten their history if they find these words
    waits = {name: value for name, value in response.headers.items() if name.lower().startswith("retry-after")}
    return web.json_response(
        anthropic_messages.error_body(response.status, message), status=response.status, headers=waits
    )


def _error_message(body: bytes) -> str:
    """Return the message of an error in the format of OpenAI or of another server."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, Mapping) else error)
    except (ValueError, TypeError, KeyError):
        return text


def models_response(request: web.Request, name: str | None, **fields: str) -> web.Response:
    """Return the list of models, which has at most one model, in the format of the client's API."""
    if _is_anthropic(request):
        return web.json_response(anthropic_messages.models_body([name] if name else []))
    models = [{"id": name, "object": "model", **fields}] if name else []
    return web.json_response({"object": "list", "data": models})


@web.middleware
async def _reject_compressed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject compressed requests: OpenAI's clients send none, and decompressing a small one can take seconds."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        return error_response(415, "the request is compressed; send it without Content-Encoding", "BadRequestError")
    return await handler(request)


def error_response(status: int, message: str, kind: str) -> web.Response:
    """Return an error in the format of OpenAI and vLLM."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


class EventStream:
    """A stream of server-sent events that starts when the response is complete, or earlier with a ping.

    Args:
        request: the HTTP request.
        api: the client's API; None for chat completions.
    """

    def __init__(self, request: web.Request, api: Api | None) -> None:
        self._request, self._api = request, api
        self._response: web.StreamResponse | None = None

    @asynccontextmanager
    async def pings(self) -> AsyncIterator[None]:
        """Send a ping after every :data:`PING` seconds of the block, so that clients do not time out."""
        ended = asyncio.Event()
        pinging = asyncio.create_task(self._ping(ended))
        try:
            yield
        finally:
            ended.set()  # do not cancel: the headers could be written in part
            await pinging

    async def _ping(self, ended: asyncio.Event) -> None:
        while True:
            try:
                async with asyncio.timeout(PING):
                    await ended.wait()
                return
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    await self._write(self._api.ping if self._api else b": ping\n\n")

    async def send(self, events: Iterable[Mapping[str, object]]) -> web.StreamResponse:
        """Send all events of a response. With an API, each is named by its ``type``; without, ``[DONE]`` follows."""
        for event in events:
            await self._write(self._encode(event))
        return await self._end()

    async def fail(self, error: web.Response) -> web.StreamResponse:
        """Return an error response; if the stream has started, send the error as an event."""
        if self._response is None:
            return error
        body = error.body if isinstance(error.body, bytes) else b""
        event = self._api.failure(error.status, _error_message(body)) if self._api else json.loads(body)
        await self._write(self._encode(event))
        return await self._end()

    def _encode(self, event: Mapping[str, object]) -> bytes:
        name = f"event: {event['type']}\n" if self._api else ""
        return f"{name}data: {json.dumps(event)}\n\n".encode()

    async def _write(self, data: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers=_STREAM_HEADERS)
            await self._response.prepare(self._request)
        await self._response.write(data)

    async def _end(self) -> web.StreamResponse:
        if self._api is None:
            await self._write(b"data: [DONE]\n\n")
        assert self._response is not None
        await self._response.write_eof()
        return self._response


def read_single(chat: object, session: str) -> Request:
    """Parse a chat completions request for a model that gives one response.

    Args:
        chat: the request's JSON.
        session: the name of the rollout.

    Raises:
        InvalidValue: the request is malformed, or needs several responses or other tokens' log-probabilities.
    """
    request = read_request(chat)
    assert isinstance(chat, Mapping)  # checked by read_request
    if chat.get("n", 1) not in (1, None):
        raise InvalidValue("n: this engine gives one response per request", hint="send several requests")
    if chat.get("top_logprobs"):
        raise InvalidValue("top_logprobs: this engine reports only the sampled tokens' log-probabilities")
    extra = {name: value for name, value in request.sampling.extra.items() if name != "stream_options"}
    return replace(request, sampling=replace(request.sampling, extra=extra), session=session)


async def complete_clamped(model: Model, request: Request) -> Completion:
    """Complete a conversation; if the response's limit exceeds the context, sample up to the end of the context."""
    try:
        return await model.complete(request)
    except ContextExceeded:
        if request.sampling.max_tokens is None:
            raise
        return await model.complete(replace(request, sampling=replace(request.sampling, max_tokens=None)))


async def count_prompt(model: Model, request: Request) -> int:
    """Return the number of tokens of a prompt; sample one token if the model cannot count them otherwise."""
    count = await asyncio.to_thread(prompt_tokens, model, request)
    if count is not None:
        return count
    single = replace(request, sampling=replace(request.sampling, max_tokens=1))
    return (await model.complete(single)).usage.prompt


def stream_chunks(answer: Mapping[str, object], requested: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the chunks of a stream: the messages, the finish reasons, and, if requested, the usage."""
    common = {name: answer[name] for name in ("id", "created", "model") if name in answer}
    common["object"] = "chat.completion.chunk"
    messages, ends = [], []
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = dict(choice.get("message") or {})
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta["tool_calls"])]
        fields = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
        messages.append({**fields, "delta": delta, "finish_reason": None})
        ends.append({"index": choice.get("index", 0), "delta": {}, "finish_reason": choice.get("finish_reason")})
    extra = {"prompt_token_ids": answer["prompt_token_ids"]} if "prompt_token_ids" in answer else {}
    chunks: list[dict[str, object]] = [{**common, **extra, "choices": messages}, {**common, "choices": ends}]
    options = requested.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        chunks.append({**common, "choices": [], "usage": answer.get("usage")})
    return chunks
