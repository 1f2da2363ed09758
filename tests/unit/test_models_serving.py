"""What our servers of the chat completions API share."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from minisandbox.models.http import Failed, Timeouts, Transport
from minisandbox.models.serving import HttpServer

pytestmark = pytest.mark.once
KEY = b"sk-nobody-elses"
PART = KEY[:-1]
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


def test_a_packed_body_is_not_unpacked() -> None:
    """One of 1 MB kept the proxy from everybody else for 8 s."""
    assert b" 415 " in ask(HEAD + b"\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n")
    assert b" 500 " in ask(HEAD + b"\r\nContent-Encoding: identity\r\n\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nX: " + PART + b"\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + PART,
        b"HTTP/1.1 401 Unauthorized\r\nX: Bearer " + KEY[:9],
    ],
    ids=["header", "chunk", "cut"],
)
def test_an_answer_that_is_no_http_is_not_quoted(answer: bytes) -> None:
    async def no_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer + b"\r\n")
        writer.close()

    async def run() -> str:
        server = await asyncio.start_server(no_http, "127.0.0.1", 0)
        transport = Transport(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", KEY.decode(), Timeouts(), 9999
        )
        async with server:
            with pytest.raises(Failed) as failed:
                await transport.send("/chat/completions", b"{}", "")
        await transport.close()
        return str(failed.value.error)

    said = asyncio.run(run())
    assert KEY[:9].decode() not in said
    assert "no response from" in said
