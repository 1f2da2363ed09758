"""What tests of the client share: a client that is closed, servers that answer the same to everybody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from minisandbox.models import Message, OpenAIModel, Request, Timeouts, client

KEY = "sk-very-secret-0123456789"
LONG = 60.0
ASK = Request((Message("user", "Is it so?"),), session="task-1.0")


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let failed tries be repeated at once, and no proxy of this machine be asked."""
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.01)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), LONG)

    asyncio.run(bounded())


@asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[OpenAIModel]:
    model = OpenAIModel("scripted", url, **{"retries": 2, "timeouts": Timeouts(total=LONG), **options})  # type: ignore[arg-type]
    try:
        yield model
    finally:
        await model.close()


def canned(status: int, body: object) -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    return app


@asynccontextmanager
async def answering(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
