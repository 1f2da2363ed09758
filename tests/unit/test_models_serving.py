"""What our servers of the chat completions API share."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from minisandbox.models.serving import HttpServer

pytestmark = pytest.mark.once
KEY = b"sk-nobody-elses"
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY


async def fails(_request: web.Request) -> web.Response:
    raise ValueError("a mistake of ours")


def ask(request: bytes) -> bytes:
    async def run() -> bytes:
        server = HttpServer("127.0.0.1", 0)
        server.route("GET", "/", fails)
        async with server:
            port = int(server.base_url.removeprefix("http://127.0.0.1:").removesuffix("/v1"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answer = await reader.readline()
            writer.close()
            return answer

    return asyncio.run(run())


@pytest.mark.parametrize("rest", [b"\0\r\n\r\n", b"\r\nx" * 9000], ids=["NUL", "too much"])
def test_a_request_that_is_no_http_is_in_no_log(caplog: pytest.LogCaptureFixture, rest: bytes) -> None:
    assert b" 400 " in ask(HEAD + rest)
    assert not caplog.text


def test_a_mistake_of_ours_is_in_the_log_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    assert b" 500 " in ask(HEAD + b"\r\n\r\n")
    assert "a mistake of ours" in caplog.text
    assert KEY.decode() not in caplog.text
