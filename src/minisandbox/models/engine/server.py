"""The engine as an HTTP server: OpenAI's chat completions, with vLLM's token ids."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from urllib.parse import unquote

from aiohttp import web

from minisandbox.errors import ContextExceeded, InvalidValue, ModelError, ModelRefused
from minisandbox.models.dialect import answer_body, read_request, wants_tokens
from minisandbox.models.http import SESSION_HEADER
from minisandbox.models.protocol import Model, Request
from minisandbox.models.serving import HttpServer, error_response, has_key, stream_of


class EngineServer(HttpServer):
    """Serves a model on ``/v1/chat/completions``, ``/v1/models`` and ``/health``, until :meth:`stop`.

    Requests with ``"return_token_ids": true`` get ``prompt_token_ids`` and each choice's ``token_ids``, as from vLLM.
    Streamed responses come in one piece. When a client disconnects, its sampling stops.

    Args:
        model: the model; its owner closes it.
        host: the address to listen on.
        port: the port; 0 for any free one, which :attr:`base_url` shows.
        name: the model's name for clients; empty: its own name.
        key: the API key that requests must have; empty for none.
    """

    def __init__(self, model: Model, *, host: str = "127.0.0.1", port: int = 0, name: str = "", key: str = "") -> None:
        super().__init__(host, port)
        self._model, self._name, self._key = model, name or model.name, key
        self._numbers = itertools.count()
        self.route("POST", "/v1/chat/completions", self._complete)
        self.route("GET", "/v1/models", self._models)
        self.route("GET", "/health", self._health)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if self._key and not has_key(http, self._key):
            return error_response(401, "the API key is wrong", "authentication_error")
        try:
            body = json.loads(await http.read())
            request = self._read(body, unquote(http.headers.get(SESSION_HEADER, "")))
            completion = await self._model.complete(request)
        except (ValueError, ModelRefused, ContextExceeded) as error:  # InvalidValue and bad JSON are ValueErrors
            message = error.what if isinstance(error, InvalidValue | ModelError) else str(error)
            return error_response(400, message, "BadRequestError")
        except RecursionError:
            return error_response(400, "the request's lists and objects are nested too deeply", "BadRequestError")
        except ModelError as error:
            return error_response(503, str(error), "ServiceUnavailableError")
        answer = answer_body(completion, tokens=wants_tokens(body), number=next(self._numbers))
        answer["created"] = int(time.time())
        usage = answer["usage"]
        assert isinstance(usage, dict)
        usage["queue_time"] = round(request.queue.seconds, 3)
        if body.get("stream"):
            return await stream_of(http, answer, body)
        return web.json_response(answer)

    def _read(self, body: object, session: str) -> Request:
        request = read_request(body)
        assert isinstance(body, Mapping)  # read_request checks that
        if body.get("n", 1) not in (1, None):
            raise InvalidValue("n: this engine gives one response per request", hint="send several requests")
        if body.get("top_logprobs"):
            raise InvalidValue("top_logprobs: this engine reports only the sampled tokens' log-probabilities")
        name = body.get("model", self._name)
        if name != self._name:
            raise InvalidValue(f"The model `{name}` does not exist.", hint=f"this server has {self._name}")
        return Request(request.messages, request.tools, request.sampling, session)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "local"}]}
        )

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})
