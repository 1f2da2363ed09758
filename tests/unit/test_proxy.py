"""The network proxy at work, in this process, with an ordinary socket as its listener."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest

from minisandbox.egress import proxy
from minisandbox.egress.rules import HostPort, Rules, Upstream

Told = list[str]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Recorder(proxy.Reports):
    """Keeps what is reported."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def refused(self, why: str) -> None:
        self.told.append(why)


@asynccontextmanager
async def tenant(*hosts: str, private: bool = True, upstream: Upstream = Upstream()) -> AsyncIterator[tuple[int, Told]]:  # noqa: B008 - frozen
    """A proxy for one sandbox: its port, and the refusals that it reports."""
    told: Told = []
    terms = proxy.ProxyTerms(Rules(hosts, private), upstream, unused=3600)
    with ThreadPoolExecutor(4) as threads, socket.create_server(("127.0.0.1", 0)) as listener:
        made = proxy.SandboxProxy(terms, Recorder(told), threads)
        made.serve(listener, lambda: None)
        yield listener.getsockname()[1], told
        asyncio.get_running_loop().remove_reader(listener)
        for task in made._tasks:
            task.cancel()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[int]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(served, "127.0.0.1", 0) as made:
        yield made.sockets[0].getsockname()[1]


async def ask(port: int, *pieces: bytes, end: bool = True) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.03)
        if end:
            writer.write_eof()
        async with asyncio.timeout(20):
            while piece := await reader.read(65536):
                data += piece
    except ConnectionResetError:
        data += b"(reset)"
    finally:
        writer.close()
    return data


def answering(
    seen: list[bytes], answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", wait: int = 1
) -> Serve:
    """A server that reads until it has seen an empty line so many times, answers, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while data.count(b"\r\n\r\n") < wait and (piece := await reader.read(65536)):
            data += piece
        seen.append(data)
        writer.write(answer)
        await writer.drain()

    return serve


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def test_a_name_is_asked_for_once_and_its_checked_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = [["127.0.0.1"], ["169.254.169.254"], ["10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1"], []]

    def look_up(host: str) -> list[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    async def work() -> None:
        monkeypatch.setattr(proxy, "_look_up", look_up)
        seen: list[bytes] = []
        async with server(answering(seen)) as port, tenant(f"*.example.org:{port}") as (door, told):
            request = f"CONNECT a.example.org:{port} HTTP/1.1\r\n\r\n".encode()
            assert b"200 Connection established" in await ask(door, request)
            assert asked == ["a.example.org"]
            assert b" 403 " in await ask(door, request)
            assert len(told) == 1
        async with tenant("a.example.org", private=False) as (door, told):
            assert b" 403 " in await ask(door, b"CONNECT a.example.org:443 HTTP/1.1\r\n\r\n")
            assert len(told) == 1
            assert b" 502 " in await ask(door, b"CONNECT a.example.org:443 HTTP/1.1\r\n\r\n")
            assert len(told) == 1

    run(work())


def test_of_several_addresses_only_those_that_are_fine_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(proxy, "_look_up", lambda _: ["169.254.169.254", "::", "127.0.0.1"])
        seen: list[bytes] = []
        async with server(answering(seen)) as port, tenant(f"h:{port}") as (door, told):
            answer = await ask(door, f"GET http://h:{port}/x HTTP/1.1\r\nHost: h:{port}\r\n\r\n".encode())
            assert answer.endswith(b"\r\n\r\nok")
            assert seen == [f"GET /x HTTP/1.1\r\nHost: h:{port}\r\nConnection: close\r\n\r\n".encode()]
            assert told == []

    run(work())


def test_lookups_that_no_thread_is_left_for_keep_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them, and no name was looked up any more."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        monkeypatch.setattr(proxy, "_look_up", lambda _: ["127.0.0.1"])
        async with server(answering([])) as port, tenant(f"h:{port}") as (door, _):
            request = f"CONNECT h:{port} HTTP/1.1\r\n\r\n".encode()
            with monkeypatch.context() as patch:
                patch.setattr(ThreadPoolExecutor, "submit", refuse)
                for _ in range(proxy._RESOLVERS):
                    assert b" 502 h: no thread is left" in await ask(door, request)
            assert b" 200 " in await ask(door, request)

    run(work())


def test_this_machines_own_address_counts_as_private() -> None:
    assert proxy._is_own("127.0.0.1")
    assert not proxy._is_own("192.0.2.1")


BODY = b"POST http://127.0.0.1:%d/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_bodies_in_chunks_are_written_anew() -> None:
    async def work() -> None:
        seen: list[bytes] = []
        async with server(answering(seen, wait=2)) as port, tenant(f"127.0.0.1:{port}") as (door, told):
            pieces = (
                BODY % (port, port) + b"0005;x=y\r\nhel",
                b"lo\r\n1",
                b"0\r\n" + b"z" * 16 + b"\r\n0\r",
                b"\n\r\n",
            )
            assert (await ask(door, *pieces)).endswith(b"ok")
            assert seen[0].partition(b"\r\n\r\n")[2] == b"5\r\nhello\r\n10\r\n" + b"z" * 16 + b"\r\n0\r\n\r\n"
            assert told == []

    run(work())


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhelloX\r\n0\r\n\r\n", b"-1\r\n", b"5\nhello\r\n0\r\n\r\n", b"0\r\nHost: other\r\n\r\n", b"\r\n",
        b"0\r\n\r\nGET http://other/ HTTP/1.1\r\nHost: other\r\n\r\n", b"x" * 2000, b"5\r\nhello\n0\r\n\r\n",
    ],
)  # fmt: skip
def test_what_a_body_in_chunks_may_not_hide(body: bytes) -> None:
    async def work() -> None:
        seen: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.read(-1))

        async with server(serve) as port, tenant(f"127.0.0.1:{port}") as (door, told):
            assert await ask(door, BODY % (port, port), body) == b"(reset)"
            assert len(told) == 1
            assert all(b"other" not in data for data in seen)

    run(work())


def test_a_head_without_a_request_is_refused_and_told() -> None:
    async def work() -> None:
        async with tenant("localhost") as (port, told):
            assert b"403" in await ask(port, b"\r\n\r\nGET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await ask(port) == b""
            assert told == ["a head without a request line"]

    run(work())


def test_a_second_request_is_never_passed_on() -> None:
    async def work() -> None:
        seen: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.read(-1))

        async with server(serve) as port, tenant(f"127.0.0.1:{port}") as (door, told):
            head = b"POST http://127.0.0.1:%d/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 2\r\n\r\n" % (
                port,
                port,
            )
            second = b"GET http://other/ HTTP/1.1\r\nHost: other\r\n\r\n"
            assert b" 403 " in await ask(door, head + b"ab" + second)
            assert await ask(door, head + b"a", b"b" + second) == b"(reset)"
            assert await ask(door, head, b"ab", second) == b"(reset)"
            assert len(told) == 3
            assert all(data.endswith(b"\r\n\r\nab") for data in seen)

    run(work())


def test_a_server_that_answers_early() -> None:
    async def work() -> None:
        seen: list[bytes] = []
        async with (
            server(answering(seen, b"HTTP/1.1 413 no\r\n\r\n")) as port,
            tenant(f"127.0.0.1:{port}") as (door, _),
        ):
            head = b"PUT http://127.0.0.1:%d/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 9\r\n\r\n" % (
                port,
                port,
            )
            assert (await ask(door, head, b"a", b"b", end=False)).startswith(b"HTTP/1.1 413 ")

    run(work())


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        released = threading.Event()

        def slow(_: str) -> list[str]:
            released.wait(60)
            return []

        async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.read(-1)

        async with server(silent) as port, tenant(f"127.0.0.1:{port}", "slow") as (door, told):
            with monkeypatch.context() as patch:  # each short for itself: what is not tried here may be slow
                patch.setattr(proxy, "_HEAD_PATIENCE", 0.2)
                assert await ask(door, b"CONNECT ", end=False) == b"(reset)"
            request = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode()
            with monkeypatch.context() as patch:
                patch.setattr(proxy, "_IDLE_PATIENCE", 0.2)
                assert (await ask(door, request, end=False)).endswith(b"(reset)")
            monkeypatch.setattr(proxy, "_look_up", slow)
            monkeypatch.setattr(proxy, "_CONNECT_PATIENCE", 0.2)
            answer = await ask(door, b"CONNECT slow:443 HTTP/1.1\r\n\r\n", end=False)
            released.set()
            assert b" 502 slow:443 does not answer" in answer
            assert told == []

    run(work())


def test_the_way_through_a_proxy_of_this_machine() -> None:
    async def work() -> None:
        seen: list[bytes] = []
        yes = b"HTTP/1.1 200 fine\r\nVia: x\r\n\r\nearly"
        async with server(answering(seen, yes)) as port:
            beyond = Upstream(f"http://me:pw@127.0.0.1:{port}", f"http://127.0.0.1:{port}")
            hosts = ("*.example.org", "a.example.org:444", "127.0.0.1:81")
            async with tenant(*hosts, private=False, upstream=beyond) as (door, told):
                got = await ask(door, b"CONNECT A.example.org:444 HTTP/1.1\r\n\r\n")
                assert got == b"HTTP/1.1 200 Connection established\r\n\r\nearly"
                assert seen.pop() == (
                    b"CONNECT a.example.org:444 HTTP/1.1\r\nHost: a.example.org:444\r\n"
                    b"Proxy-Authorization: Basic bWU6cHc=\r\n\r\n"
                )
                assert await ask(door, b"GET http://b.example.org/x HTTP/1.1\r\nHost: b.example.org\r\n\r\n") == yes
                assert seen.pop().startswith(b"GET http://b.example.org/x HTTP/1.1\r\n")
                for target in (b"other:443", b"127.0.0.1:81"):
                    assert b" 403 " in await ask(door, b"CONNECT %b HTTP/1.1\r\n\r\n" % target)
                assert seen == []
                assert len(told) == 2

    run(work())


def test_a_password_goes_to_the_proxy_of_this_machine_alone() -> None:
    """A plain request goes through a tunnel, whose server sees nothing of the password."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 no\r\n\r\n" + seen[-1])

    async def work() -> None:
        async with server(serve) as port:
            beyond = Upstream(*[f"http://me:pw@127.0.0.1:{port}"] * 2)
            async with tenant("b.example.org", private=False, upstream=beyond) as (door, told):
                got = await ask(door, b"GET http://b.example.org/x HTTP/1.1\r\nHost: b.example.org\r\n\r\n")
        asked = b"GET /x HTTP/1.1\r\nHost: b.example.org\r\nConnection: close\r\n\r\n"
        assert got == b"HTTP/1.1 404 no\r\n\r\n" + asked
        assert seen[0].startswith(b"CONNECT b.example.org:80 HTTP/1.1\r\n")
        assert seen[1:] == [asked]
        assert told == []

    run(work())


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 407 %b\r\n\r\n",
        b"HTTP/1.1 502 no\r\n\r\n%b",
        b"HTTP/1.1 200 OK\r\n\r\n%b",
        b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n%b",
        b"HTTP/1.1 200 OK\r\ncontent-length :1\r\nA: b\r\n\r\n%b",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%b",
    ],
)
def test_a_proxy_of_this_machine_that_repeats_what_it_was_sent(says: bytes) -> None:
    """As Squid's pages of errors do (CVE-2025-62168): it must not tell the password that it was sent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = await reader.readuntil(b"\r\n\r\n")
        writer.write(says % heard.replace(b"\r\n", b" "))

    async def work() -> None:
        async with server(serve) as port:
            beyond = Upstream(*[f"http://me:pw@127.0.0.1:{port}"] * 2)
            async with tenant("h.org", "h.org:22", private=False, upstream=beyond) as (door, _):
                got = await ask(door, b"GET http://h.org/ HTTP/1.1\r\nHost: h.org\r\n\r\n")
                assert b" 502 " in got
                told = b"it answers before it was asked"
                if b"Length" in says or b"length" in says or b"Transfer" in says:
                    told = b"the proxy of this machine answers with a page"
                    got += await ask(door, b"CONNECT h.org:22 HTTP/1.1\r\n\r\n", b"SSH-2.0\r\n")
                if b"200" not in says:
                    told = b"the proxy of this machine answers " + says[9:12]
                for target, sent in ((b"h.org:80", b"GET / HTTP/1.1\r\n\r\n"), (b"h.org:443", hello("h.org"))):
                    answer = await ask(door, b"CONNECT %b HTTP/1.1\r\n\r\n" % target, sent)
                    assert told in answer
                    got += answer
                assert b"bWU6cHc" not in got

    run(work())


def hello(name: str | None) -> bytes:
    """What a TLS client sends first."""
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    context.check_hostname = False
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


def test_a_tunnel_carries_what_its_port_is_for() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.write(b"220 smtp ready " + await reader.read())

    async def work() -> None:
        connected = b"HTTP/1.1 200 Connection established\r\n\r\n"
        good, other, http = hello("a.example.org"), hello("b.example.org"), b"GET / HTTP/1.1\r\n\r\n"
        async with server(serve) as port:
            beyond = Upstream(f"http://127.0.0.1:{port}")
            hosts = ("a.example.org", "named.example.org:443")
            async with tenant(*hosts, private=False, upstream=beyond) as (door, told):
                for target, data in (("a:443", good), ("a:443", hello(None)), ("a:80", http), ("named:443", b"SSH-2")):
                    host, _, number = target.partition(":")
                    request = f"CONNECT {host}.example.org:{number} HTTP/1.1\r\n\r\n".encode()
                    assert await ask(door, request + data) == connected + b"220 smtp ready " + data
                    assert await ask(door, request, data[:3], data[3:]) == connected + b"220 smtp ready " + data
                assert told == []
                for target, data in (
                    ("443", other),
                    ("443", b"SSH-2.0-x\r\n"),
                    ("443", http),
                ):
                    request = f"CONNECT a.example.org:{target} HTTP/1.1\r\n\r\n".encode()
                    assert (await ask(door, request, data)).endswith(b"(reset)")
                request = b"CONNECT a.example.org:443 HTTP/1.1\r\n\r\n"
                # what follows the first message of TLS is not looked at, and nor is what port 80 carries
                assert await ask(door, request, good + other) == connected + b"220 smtp ready " + good + other
                assert b"220 smtp ready \0" in await ask(door, b"CONNECT a.example.org:80 HTTP/1.1\r\n\r\n", b"\0")
                assert await ask(door, request) == connected + b"(reset)"  # nor is what a server says first
                assert len(told) == 3
                assert "asks for b.example.org" in told[0]

    run(work())


def test_a_proxy_of_this_machine_that_says_no() -> None:
    async def work() -> None:
        for answer in (b"HTTP/1.1 407 who\r\n\r\n", b"", b"nonsense", b"x" * 70_000):
            async with (
                server(answering([], answer)) as port,
                tenant("h", upstream=Upstream(f"http://127.0.0.1:{port}")) as (door, told),
            ):
                got = await ask(door, b"CONNECT h:443 HTTP/1.1\r\n\r\n")
                assert b" 502 h:443: the proxy of this machine" in got
                assert told == []

    run(work())


def test_every_refusal_is_counted_and_a_flood_is_told_in_part() -> None:
    texts, reporters = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    counter = os.eventfd(0)
    reports = proxy.Reports(reporters, counter)
    with texts, contextlib.closing(reports):
        for number in range(1000):
            reports.refused(f"why {number}")
        assert os.eventfd_read(counter) == 1000
        assert [texts.recv(100) for _ in range(100)] == [b"refused: why %d" % number for number in range(100)]
        for _ in range(10_000):  # more than anybody reads: nothing waits
            reports.send("x" * 100)
        reports.refused("late")
        assert os.eventfd_read(counter) == 1


def test_ipv6() -> None:
    try:
        server_socket = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")

    async def work() -> None:
        port = server_socket.getsockname()[1]
        async with tenant(f"[::1]:{port}") as (door, told):
            accepted = asyncio.get_running_loop().run_in_executor(None, server_socket.accept)
            answer = asyncio.ensure_future(ask(door, f"CONNECT [0::1]:{port} HTTP/1.1\r\n\r\n".encode()))
            connection, _ = await accepted
            connection.close()
            assert b" 200 " in await answer
            assert told == []

    with server_socket:
        run(work())


def test_little_waits_to_be_sent_to_a_server_that_does_not_read() -> None:
    """The kernel would keep 4 MB for each connection, which counts to nobody and outlives the sandbox."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = HostPort("127.0.0.1", server.getsockname()[1])
        with asyncio.run(proxy._connect_any(["127.0.0.1"], target)) as connection:
            sent = 0
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.5)  # with the server's buffer full no more is taken
                while True:
                    sent += connection.send(bytes(1 << 16))
            assert sent > 0
            waiting = int.from_bytes(fcntl.ioctl(connection, 0x894B, bytes(4)), sys.byteorder)  # SIOCOUTQNSD
            assert 0 < waiting < 3 << 17
