"""Serve a model over HTTP: chat completions with vLLM's token ids, Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from urllib.parse import unquote

from aiohttp import web

from minisandbox.errors import ContextExceeded, InvalidValue, ModelError, ModelRefused
from minisandbox.models.anthropic_messages import MESSAGES
from minisandbox.models.apis import Api
from minisandbox.models.dialect import answer_body, wants_tokens
from minisandbox.models.http import SESSION_HEADER
from minisandbox.models.openai_responses import RESPONSES
from minisandbox.models.protocol import Model, Request
from minisandbox.models.serving import (
    EventStream,
    HttpServer,
    complete_clamped,
    count_prompt,
    error_response,
    has_key,
    models_response,
    read_single,
    stream_chunks,
)


class EngineServer(HttpServer):
    """A server for one model, with chat completions, Messages, Responses, ``/v1/models`` and ``/health``.

    If a chat completions request has ``"return_token_ids": true``, the response contains ``prompt_token_ids`` and each
    choice's ``token_ids``, as from vLLM. A stream starts only after the whole response has been sampled. If a client
    disconnects, the engine stops sampling its response.

    Args:
        model: the model; its owner closes it.
        host: the address to listen on.
        port: the port; 0 for any free port, which :attr:`base_url` then contains.
        name: the model's name for clients; empty for the model's own name.
        key: the API key that clients must send; empty to accept requests without a key.
    """

    def __init__(self, model: Model, *, host: str = "127.0.0.1", port: int = 0, name: str = "", key: str = "") -> None:
        super().__init__(host, port)
        self._model, self._name, self._key = model, name or model.name, key
        self._numbers = itertools.count()
        self.route("POST", "/v1/chat/completions", partial(self._handle, api=None))
        for api in (MESSAGES, RESPONSES):
            self.route("POST", f"/v1{api.path}", partial(self._handle, api=api))
        self.route("POST", "/v1/messages/count_tokens", partial(self._handle, api=MESSAGES, counts=True))
        self.route("GET", "/v1/models", self._models)
        self.route("GET", "/health", self._health)

    async def _handle(self, http: web.Request, *, api: Api | None, counts: bool = False) -> web.StreamResponse:
        """Check the key, then parse and handle a request; return errors in OpenAI's format."""
        if self._key and not has_key(http, self._key):
            return error_response(401, "the API key is wrong", "authentication_error")
        stream = EventStream(http, api)
        try:
            body = json.loads(await http.read())
            request = self._read(api.read(body) if api else body, unquote(http.headers.get(SESSION_HEADER, "")))
            if counts:
                return web.json_response({"input_tokens": await count_prompt(self._model, request)})
            async with stream.pings() if body.get("stream") else nullcontext():
                answer = await (self._complete_with(api, request, body) if api else self._complete(request, body))
        except (ValueError, ModelError, RecursionError) as error:  # InvalidValue and bad JSON are ValueErrors
            return await stream.fail(_error_of(error))
        if not body.get("stream"):
            return web.json_response(answer)
        return await stream.send(api.events(answer) if api else stream_chunks(answer, body))

    async def _complete(self, request: Request, body: Mapping[str, object]) -> dict[str, object]:
        completion = await self._model.complete(request)
        answer = answer_body(completion, tokens=wants_tokens(body), number=next(self._numbers))
        answer["created"] = int(time.time())
        usage = answer["usage"]
        assert isinstance(usage, dict)
        usage["queue_time"] = round(request.queue.seconds, 3)
        return answer

    async def _complete_with(self, api: Api, request: Request, body: Mapping[str, object]) -> dict[str, object]:
        return api.answer(await complete_clamped(self._model, request), body)

    def _read(self, body: object, session: str) -> Request:
        request = read_single(body, session)
        assert isinstance(body, Mapping)  # checked by read_single
        name = body.get("model", self._name)
        if name != self._name:
            raise InvalidValue(f"The model `{name}` does not exist.", hint=f"this server has {self._name}")
        return request

    async def _models(self, request: web.Request) -> web.Response:
        return models_response(request, self._name, owned_by="local")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


def _error_of(error: Exception) -> web.Response:
    """Return the error response in OpenAI's format."""
    if isinstance(error, ModelError) and not isinstance(error, ModelRefused | ContextExceeded):
        return error_response(503, str(error), "ServiceUnavailableError")
    message = error.what if isinstance(error, InvalidValue | ModelError) else str(error)
    if isinstance(error, RecursionError):
        message = "the request's lists and objects are nested too deeply"
    return error_response(400, message, "BadRequestError")
