"""A chat completions server for tests, which responds from a script and can produce faults.

``python -m tests.scripted_server --script FILE --port 0`` serves a script in :class:`Script`'s format until it is
stopped; the first line of its output is the address for ``--api-base``. In tests::

    async with ScriptedServer(["first answer", "second answer"]) as server:
        server.fail("rate_limit", "reset")
        model = OpenAIModel("scripted", server.url)

    with serving(ScriptedServer({"task-1": ["..."], "task-2": [{"fault": "timeout"}]})) as server:
        subprocess.run([..., "--api-base", server.url])

It speaks vLLM's dialect, with token ids if they are requested. A rollout is identified by the header ``X-Session-Id``,
else by the field ``user``, else by the key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from aiohttp import web

from minisandbox.errors import ContextExceeded, InvalidValue, ModelError
from minisandbox.models.dialect import PROBE, answer_body, read_request, wants_tokens
from minisandbox.models.http import SESSION_HEADER
from minisandbox.models.protocol import Completion, Message, Request, Tokens, TokenUsage
from minisandbox.models.scripted import Script
from minisandbox.models.serving import LARGEST_REQUEST
from tests.scripted_model import FAULTS, Fault, Scripted, SimulatedModel, fault_of, script_of

_PATIENCE = 30.0
_KEPT = 1000
_HUGE = 10 * 1024 * 1024
_DRIP = 0.05  # seconds between two bytes

Body = Mapping[str, object]


def _probed(processed: bool) -> dict[str, object]:
    """Return the response to the client's probe for log-probabilities of the sampled distribution."""
    tokens = Tokens(array("i", [1, 2]), array("i", [3, 4]), array("d", [0.0, 0.0] if processed else [-0.19, -0.5]))
    return answer_body(Completion(Message("assistant", "word"), "length", TokenUsage(2, 2), tokens), tokens=True)


@dataclass(frozen=True, slots=True)
class Received:
    """A received request.

    Attributes:
        session: its rollout.
        headers: its HTTP headers.
        body: its JSON.
        fault: the fault in response.
    """

    session: str
    headers: Mapping[str, str]
    body: Mapping[str, object]
    fault: Fault | None


class ScriptedServer:
    """Serves a script during an ``async with`` block.

    Attributes:
        received: the latest 1,000 requests.
        count: the number of requests.
        in_flight: requests in progress.
        most_in_flight: the maximum of that.
        orders: the settings of faults: the time to wait of ``rate_limit_retry_after``.

    Args:
        script: answers in order, answers by instance, a script, or a function of the request.
        latency: seconds to a response, or a function of the request that returns them.
        context: maximum tokens of prompt and response together.
        tokens: whether it reports token ids on request.
        processed: whether its log-probabilities are of the distribution that it samples from.
        models: the known model names; None for any name.
        host: the address to listen on.
        port: the port; 0 for any free one.
    """

    def __init__(
        self,
        script: Scripted,
        *,
        latency: float | Callable[[Request], float] = 0.0,
        context: int | None = None,
        tokens: bool = True,
        processed: bool = True,
        models: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._answer = script_of(script)
        self._model = SimulatedModel(self._reply, latency=latency, context=context)
        self._tokens = tokens
        self._processed = processed
        self._models = models
        self._host = host
        self._port = port
        self._faults: dict[str | None, deque[Fault | None]] = {}
        self.orders = Orders()
        self._runner: web.AppRunner | None = None
        self.received: deque[Received] = deque(maxlen=_KEPT)
        self.count = 0
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def url(self) -> str:
        """The address for ``--api-base``."""
        return f"http://{self._host}:{self._port}/v1"

    def fail(self, *faults: Fault | None, session: str | None = None) -> None:
        """Produce faults for the next requests, in this order; None is a normal response.

        Args:
            faults: the faults.
            session: only for requests of this rollout.
        """
        self._faults.setdefault(session, deque()).extend(faults)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start serving."""
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        # requests in progress end with the server; a client that disconnects cancels its request
        self._runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop serving, and close open connections."""
        self.orders.ending.set()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _list_models(self, _request: web.Request) -> web.StreamResponse:
        names = self._models or ("scripted",)
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answered(request)
        finally:
            self.in_flight -= 1

    async def _answered(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if body.get("messages") == [message.to_json() for message in PROBE]:
            return web.json_response(_probed(self._processed))
        session = _session(http, body)
        fault = self._next_fault(session)
        number = self.count
        self.count += 1
        self.received.append(Received(session, dict(http.headers), body, fault))
        if body.get("stream"):
            return error(400, "this server does not stream")
        if self._models is not None and body.get("model") not in self._models:
            return await misbehave("unknown_model", self.orders, http, body)
        if fault is not None:
            return await misbehave(fault, self.orders, http, body)
        return await self._usual(http, body, session, number)

    def _next_fault(self, session: str) -> Fault | None:
        for queue in (self._faults.get(session), self._faults.get(None)):
            if queue:
                return queue.popleft()
        return None

    async def _usual(
        self, http: web.Request, body: Mapping[str, object], session: str, number: int
    ) -> web.StreamResponse:
        try:
            asked = replace(read_request(body), session=session)
            completion = await self._model.complete(asked)
        except InvalidValue as wrong:
            return error(400, str(wrong))
        except ContextExceeded:
            return await misbehave("context_length", self.orders, http, body)
        except _ScriptedFault as scripted:
            return await misbehave(scripted.fault, self.orders, http, body)
        except ModelError as refused:
            return error(404, str(refused))
        completion = replace(completion, model=str(body.get("model", "")))
        return answer(answer_body(completion, tokens=self._tokens and wants_tokens(body), number=number))

    def _reply(self, request: Request) -> str | Message:
        answer = self._answer(request)
        fault = fault_of(answer)
        if fault is not None:
            raise _ScriptedFault(fault)
        return answer

    async def wait_for_end(self) -> None:
        """Wait until the server stops."""
        await self.orders.ending.wait()


class _ScriptedFault(Exception):
    """The script has a fault here."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault: Fault = fault


def _session(http: web.Request, body: Mapping[str, object]) -> str:
    key = http.headers.get("Authorization", "").removeprefix("Bearer ")
    return unquote(http.headers.get(SESSION_HEADER, "")) or str(body.get("user") or key)


# --- faults: a handler for each ---------------------------------------------------------------------------------------


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


# --- for programs without an event loop, and as a command ----------------------------------------------------------


@contextmanager
def serving(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serve from a thread, for tests without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(_PATIENCE)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(_PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_PATIENCE)
        loop.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a script until stopped."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripted_server", description=main.__doc__)
    parser.add_argument("--script", type=Path, required=True, help="answers: JSON or JSON Lines")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS", help="time to a response")
    parser.add_argument(
        "--fault", action="append", choices=FAULTS, default=[], help="fault of the next request; may be repeated"
    )
    args = parser.parse_args(arguments)
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    server = ScriptedServer(Script.load(args.script), latency=args.latency, host=args.host, port=args.port)
    server.fail(*args.fault)
    async with server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await server.wait_for_end()


if __name__ == "__main__":
    main()
