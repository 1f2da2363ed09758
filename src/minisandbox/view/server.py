"""Serve the pages to the browser of one user.

It accepts requests with the token of this start, which a cookie carries after the first request, and whose Host header
is this machine's: a page of another site can neither read nor drive it, even if its name resolves to this machine (DNS
rebinding). All requests read, except for POST, which replays a rollout's commands in a sandbox: it needs an Origin
header that names this server.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisandbox.errors import InvalidValue, MiniSandboxError, NotFound
from minisandbox.view.index import Filter
from minisandbox.view.pages import STATIC, Pages
from minisandbox.view.site import Site

_SECONDS = 1.0
"""Seconds between two looks at a live run."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # no-referrer would also remove the Origin header of our own forms
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Guard:
    """Refuse requests without the token, for another host, or that change something; add the security headers.

    Args:
        app: answers the accepted requests.
        token: the secret.
        host: the name or address at which the server listens.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._app, self._token, self._host = app, token, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                fixed = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *fixed]
            await send(message)

        response = self._refusal(Request(scope)) or self._app
        await response(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not is_own_host(request.headers.get("host", ""), self._host):
            return PlainTextResponse("Not this server's name: use the address that minisandbox view printed.\n", 421)
        if request.method == "POST":
            if request.headers.get("origin") != f"{request.url.scheme}://{request.headers['host']}":
                return PlainTextResponse("Only a page of this server may send this.\n", 403)
        elif request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This server only reads, and replays.\n", 405)
        cookie = f"minisandbox-view-{request.url.port or 80}"
        if self._is_token(request.query_params.get("token", "")):
            response = RedirectResponse(_without_token(request), 303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict", path="/")
            return response
        if not self._is_token(request.cookies.get(cookie, "")):
            return PlainTextResponse("Open the address that minisandbox view printed: it contains a token.\n", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())


def is_own_host(header: str, host: str) -> bool:
    """Return whether a Host header names this server: by ``localhost``, any address, or the name that the user gave.

    Addresses are safe: an attacker can let a name of theirs resolve to this machine, but not an address.
    """
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    name = name.strip("[]").lower().removesuffix(".")
    if name in ("localhost", host.lower()):
        return bool(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_token(request: Request) -> str:
    query = [pair for pair in parse_qsl(request.url.query, keep_blank_values=True) if pair[0] != "token"]
    # More than one leading slash would name another host.
    path = "/" + request.url.path.lstrip("/")
    return f"{path}?{urlencode(query)}" if query else path


def application(site: Site, token: str, host: str, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Return the application that answers requests.

    Args:
        site: the runs.
        token: the secret that requests need.
        host: the name or address at which the server listens.
        is_ending: returns whether the server ends, which also ends streams of events.
    """
    pages = Pages(site)

    def page(render: Callable[[Request], str]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return HTMLResponse(await run_in_threadpool(render, request))

        return answer

    def name(request: Request) -> tuple[str, str, int]:
        path = request.path_params
        return path["key"], path["id"], path["attempt"]

    async def raw(request: Request) -> Response:
        text = await run_in_threadpool(pages.raw, *name(request), request.query_params.get("part", ""))
        return PlainTextResponse(text)

    async def replay(request: Request) -> Response:
        await run_in_threadpool(pages.replay, *name(request))
        return RedirectResponse(pages.links.rollout(*name(request)), 303)

    async def events(request: Request) -> Response:
        run = site.run(request.path_params["key"])
        return StreamingResponse(changes(run.state, is_ending), media_type="text/event-stream")

    async def static(request: Request) -> Response:
        path = STATIC / request.path_params["name"]
        if path.parent != STATIC or path.suffix not in _TYPES or not path.is_file():
            raise HTTPException(404)
        return Response(path.read_bytes(), media_type=_TYPES[path.suffix])

    rollout = "{attempt:int}/{id:path}"
    routes = [
        Route("/", page(lambda _: pages.runs())),
        Route("/machine", page(lambda _: pages.machine())),
        Route("/compare", page(lambda r: pages.compare(r.query_params.getlist("run")))),
        Route("/runs/{key}", page(lambda r: pages.run(r.path_params["key"], Filter.of(r.query_params)))),
        Route(
            "/runs/{key}/tasks",
            page(
                lambda r: pages.tasks(r.path_params["key"], Filter.of(r.query_params), r.query_params.get("level", ""))
            ),
        ),
        Route("/runs/{key}/tasks/{id:path}", page(lambda r: pages.task(r.path_params["key"], r.path_params["id"]))),
        Route(f"/runs/{{key}}/rollouts/{rollout}", page(lambda r: pages.rollout(*name(r)))),
        Route(
            f"/runs/{{key}}/tokens/{rollout}",
            page(lambda r: pages.tokens(*name(r), _number(r, "row"), _number(r, "start"))),
        ),
        Route(f"/runs/{{key}}/raw/{rollout}", raw),
        Route(f"/runs/{{key}}/replay/{rollout}", replay, methods=["POST"]),
        Route("/runs/{key}/training", page(lambda r: pages.training(r.path_params["key"], _number(r, "step")))),
        Route("/runs/{key}/events", events),
        Route("/static/{name}", static),
    ]
    handlers = {MiniSandboxError: partial(_failed, pages), HTTPException: partial(_failed, pages)}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token, host)


async def _failed(pages: Pages, _request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404 if isinstance(error, NotFound) else 500
    message = "There is no such page." if isinstance(error, HTTPException) else str(error)
    title = "Not found" if status == 404 else "This cannot be shown"
    return HTMLResponse(pages.render("error.html", title=title, message=message), status)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    return int(text) if text.isdecimal() and len(text) < 10 else -1


async def changes(
    state: Callable[[], object], is_ending: Callable[[], bool], pause: float = _SECONDS
) -> AsyncIterator[str]:
    """Yield server-sent events: one for each change of a state, and comments that detect a closed connection.

    Args:
        state: returns the state.
        is_ending: returns whether to end.
        pause: seconds between two looks.
    """
    before = state()
    yield "retry: 2000\n\n"
    while not is_ending():
        await asyncio.sleep(pause)
        if (now := state()) != before:
            before = now
            yield "event: change\ndata: 1\n\n"
        else:
            yield ":\n\n"


def serve(site: Site, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until Ctrl-C.

    Args:
        site: the runs.
        host: the address or name at which to listen.
        port: the port; 0 for any free one.
        started: called with the URL once the server listens.

    Raises:
        InvalidValue: the server cannot listen there.
    """
    token = secrets.token_urlsafe(24)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidValue(
            f"cannot listen on {host}, port {port}", reason=error.strerror, hint="--port 0 chooses a free port"
        ) from error
    config = uvicorn.Config(
        application(site, token, host, lambda: server.should_exit), log_level="warning", access_log=False,
        lifespan="off", timeout_graceful_shutdown=5, server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with listener:
        name = f"[{host}]" if ":" in host else host
        started(f"http://{name}:{listener.getsockname()[1]}/?token={token}")
        server.run(sockets=[listener])
