"""Serve a model over HTTP: chat completions with vLLM's token ids, Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

from aiohttp import web

from minisandbox.errors import ContextExceeded, InvalidValue, ModelError, ModelRefused
from minisandbox.models.anthropic_messages import MESSAGES
from minisandbox.models.apis import Api
from minisandbox.models.dialect import answer_body, read_request, wants_tokens
from minisandbox.models.http import SESSION_HEADER
from minisandbox.models.openai_responses import RESPONSES
from minisandbox.models.protocol import Completion, Model, Request, prompt_tokens
from minisandbox.models.serving import HttpServer, error_response, has_key, models_response, send_events, stream_of

Work = Callable[[web.Request, Mapping[str, object], Request], Awaitable[web.StreamResponse]]
"""A function that responds to an HTTP request, from the HTTP request, its JSON and the parsed request."""


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
        self.route("POST", "/v1/chat/completions", partial(self._handle, api=None, work=self._complete))
        for api in (MESSAGES, RESPONSES):
            self._route_api(api)
        self.route("POST", "/v1/messages/count_tokens", partial(self._handle, api=MESSAGES, work=self._count))
        self.route("GET", "/v1/models", self._models)
        self.route("GET", "/health", self._health)

    def _route_api(self, api: Api) -> None:
        async def complete(http: web.Request, body: Mapping[str, object], request: Request) -> web.StreamResponse:
            answer = api.answer(await self._complete_clamped(request), body)
            return await send_events(http, api.events(answer)) if body.get("stream") else web.json_response(answer)

        self.route("POST", f"/v1{api.path}", partial(self._handle, api=api, work=complete))

    async def _handle(self, http: web.Request, *, api: Api | None, work: Work) -> web.StreamResponse:
        """Check the key, then parse and handle a request; return errors in OpenAI's format."""
        if self._key and not has_key(http, self._key):
            return error_response(401, "the API key is wrong", "authentication_error")
        try:
            body = json.loads(await http.read())
            chat = api.read(body) if api else body
            request = self._read(chat, unquote(http.headers.get(SESSION_HEADER, "")))
            return await work(http, body, request)
        except (ValueError, ModelRefused, ContextExceeded) as error:  # InvalidValue and bad JSON are ValueErrors
            message = error.what if isinstance(error, InvalidValue | ModelError) else str(error)
            return error_response(400, message, "BadRequestError")
        except RecursionError:
            return error_response(400, "the request's lists and objects are nested too deeply", "BadRequestError")
        except ModelError as error:
            return error_response(503, str(error), "ServiceUnavailableError")

    async def _complete(self, http: web.Request, body: Mapping[str, object], request: Request) -> web.StreamResponse:
        completion = await self._model.complete(request)
        answer = answer_body(completion, tokens=wants_tokens(body), number=next(self._numbers))
        answer["created"] = int(time.time())
        usage = answer["usage"]
        assert isinstance(usage, dict)
        usage["queue_time"] = round(request.queue.seconds, 3)
        if body.get("stream"):
            return await stream_of(http, answer, body)
        return web.json_response(answer)

    async def _complete_clamped(self, request: Request) -> Completion:
        """Complete a conversation; if the response's limit exceeds the context, sample up to the end of the context."""
        try:
            return await self._model.complete(request)
        except ContextExceeded:
            if request.sampling.max_tokens is None:
                raise
            return await self._model.complete(replace(request, sampling=replace(request.sampling, max_tokens=None)))

    async def _count(self, _http: web.Request, _body: Mapping[str, object], request: Request) -> web.StreamResponse:
        """Return the number of tokens of a prompt; sample one token if the model cannot count them otherwise."""
        count = await asyncio.to_thread(prompt_tokens, self._model, request)
        if count is None:
            single = replace(request, sampling=replace(request.sampling, max_tokens=1))
            count = (await self._model.complete(single)).usage.prompt
        return web.json_response({"input_tokens": count})

    def _read(self, body: object, session: str) -> Request:
        request = read_request(body)
        assert isinstance(body, Mapping)  # checked by read_request
        if body.get("n", 1) not in (1, None):
            raise InvalidValue("n: this engine gives one response per request", hint="send several requests")
        if body.get("top_logprobs"):
            raise InvalidValue("top_logprobs: this engine reports only the sampled tokens' log-probabilities")
        name = body.get("model", self._name)
        if name != self._name:
            raise InvalidValue(f"The model `{name}` does not exist.", hint=f"this server has {self._name}")
        return Request(request.messages, request.tools, request.sampling, session)

    async def _models(self, request: web.Request) -> web.Response:
        return models_response(request, self._name, owned_by="local")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})
