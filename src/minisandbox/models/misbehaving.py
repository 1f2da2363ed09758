"""The faults of the scripted server: a handler for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from minisandbox.models.faults import Fault

_HUGE = 10 * 1024 * 1024
_DRIP = 0.05  # seconds between two bytes

Body = Mapping[str, object]


@dataclass(slots=True)
class Orders:
    """The settings of handlers.

    Attributes:
        ending: set when the server ends.
        retry_after: seconds that clients are asked to wait.
    """

    ending: asyncio.Event = field(default_factory=asyncio.Event)
    retry_after: float = 1.0


def answer(body: Body) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=json.dumps(body).encode(), content_type="application/json")


def error(status: int, message: str, *, kind: str = "", headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error in vLLM's format."""
    fields = {"message": message, "type": kind or "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": fields}, status=status, headers=headers)


_Handler = Callable[[Orders, web.Request, Body], Awaitable[web.StreamResponse]]


def _plain(number: int = 1) -> dict[str, object]:
    """Return a response of one word, for handlers to break."""
    completion = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": number}
    return {"object": "chat.completion", "model": "scripted", "choices": [completion], "usage": usage}


async def _timeout(orders: Orders, http: web.Request, _body: Body) -> web.StreamResponse:
    await orders.ending.wait()
    return await _reset(orders, http, _body)


async def _reset(_orders: Orders, http: web.Request, _body: Body) -> web.StreamResponse:
    if http.transport is not None:
        http.transport.abort()
    return web.Response()


async def _reset_mid_answer(_orders: Orders, http: web.Request, _body: Body) -> web.StreamResponse:
    data = json.dumps(_plain()).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(data)), "Content-Type": "application/json"})
    await response.prepare(http)
    await response.write(data[: len(data) // 2])
    if http.transport is not None:
        http.transport.close()
    return response


async def _rate_limit(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    return error(429, "Too many requests", kind="rate_limit_error")


async def _rate_limit_retry_after(orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    headers = {"Retry-After": f"{orders.retry_after:.0f}", "Retry-After-Ms": f"{orders.retry_after * 1000:.0f}"}
    return error(429, "Too many requests", kind="rate_limit_error", headers=headers)


async def _server_error(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    return error(500, "EngineCore encountered an issue", kind="InternalServerError")


async def _invalid_json(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    return web.Response(body=json.dumps(_plain()).encode()[:-20], content_type="application/json")


async def _empty_choices(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    return answer(_plain() | {"choices": []})


async def _empty_answer(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": None}, "finish_reason": "stop"}
    return answer(_plain(0) | {"choices": [choice]})


async def _aborted(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": "wor"}, "finish_reason": "abort"}
    return answer(_plain() | {"choices": [choice]})


async def _context_length(_orders: Orders, _http: web.Request, body: Body) -> web.StreamResponse:
    asked = body.get("max_tokens") or 0
    text = f"This model's maximum context length is 10 tokens. However, you requested {asked} output tokens"
    return error(400, f"{text} and your prompt contains at least 11 input tokens.")


async def _huge(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a" * _HUGE}, "finish_reason": "length"}
    return answer(_plain() | {"choices": [choice]})


async def _drip(orders: Orders, http: web.Request, _body: Body) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(http)
    while not orders.ending.is_set():
        await response.write(b" ")
        await asyncio.sleep(_DRIP)
    return response


async def _wrong_token_counts(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    logprobs = {"content": [{"token": "", "logprob": -0.5, "top_logprobs": []}]}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word"},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": logprobs,
    }
    return answer(_plain(2) | {"choices": [choice], "prompt_token_ids": [7, 8, 9]})


async def _no_tokens(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    return answer(_plain())


async def _wrong_key(_orders: Orders, http: web.Request, _body: Body) -> web.StreamResponse:
    given = http.headers.get("Authorization", "no key")
    return error(401, f"Incorrect API key provided: {given}\x1b[31m\nsee the docs", kind="invalid_request_error")


async def _unknown_model(_orders: Orders, _http: web.Request, body: Body) -> web.StreamResponse:
    return error(404, f"The model `{body.get('model')}` does not exist.", kind="NotFoundError")


async def _redirect(_orders: Orders, _http: web.Request, _body: Body) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": "http://elsewhere.invalid/v1/chat/completions"})


_HANDLERS: Mapping[Fault, _Handler] = {
    "timeout": _timeout,
    "reset": _reset,
    "reset_mid_answer": _reset_mid_answer,
    "rate_limit": _rate_limit,
    "rate_limit_retry_after": _rate_limit_retry_after,
    "server_error": _server_error,
    "invalid_json": _invalid_json,
    "empty_choices": _empty_choices,
    "empty_answer": _empty_answer,
    "aborted": _aborted,
    "context_length": _context_length,
    "huge": _huge,
    "drip": _drip,
    "wrong_token_counts": _wrong_token_counts,
    "no_tokens": _no_tokens,
    "wrong_key": _wrong_key,
    "unknown_model": _unknown_model,
    "redirect": _redirect,
}


async def misbehave(fault: Fault, orders: Orders, http: web.Request, body: Body) -> web.StreamResponse:
    """Respond to a request with a fault."""
    return await _HANDLERS[fault](orders, http, body)
