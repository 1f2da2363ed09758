"""The network proxy of one controller: a process of the host through which sandboxes reach what they were allowed.

Each sandbox has a network of its own without a route. A socket that was made in there listens for its programs; this
process holds the descriptor, accepts, and connects outwards in the host's network. Nothing of it is inside. What a
request may ask for is decided in :mod:`.proxy_rules`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import proxy_rules as rules
from . import syscalls as sc

MOST_CONNECTIONS = 256
"""Connections of one sandbox at once."""
_CONNECT_PATIENCE = 10.0
_HEAD_PATIENCE = 30.0
_IDLE_PATIENCE = 300.0
_LINGER = 1.0
_MOST_LEFT = 16
_CHUNK = 1 << 16
_MAX_MESSAGE = 1 << 18
_LINES = 100
"""Refusals of one sandbox that are told one by one; after them, one a second."""
_RESOLVERS, _RESOLVERS_EACH = 64, 4
_SECOND = "a second request on the same connection"


def main(connection: socket.socket, controller: int) -> None:
    """Serve one controller until it ends. Never returns.

    Args:
        connection: datagram socket to the controller.
        controller: pidfd of the controller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sc.overwrite_arguments("minisandbox-network")
    # it reads what sandboxes send: whatever goes wrong here should be worth nothing
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    sc.capset(0)
    asyncio.run(_serve(connection, controller))


async def _serve(connection: socket.socket, controller: int) -> None:
    proxy = _Proxy(connection)
    loop = asyncio.get_running_loop()
    loop.add_reader(controller, os._exit, 0)
    loop.add_reader(connection, proxy.take_message)
    await asyncio.Event().wait()


class _Proxy:
    """All sandboxes of the controller."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._resolvers = ThreadPoolExecutor(_RESOLVERS)
        self._tenants: dict[str, _Tenant] = {}

    def take_message(self) -> None:
        """Take one message of the controller: a sandbox to serve, or a question."""
        size = socket.CMSG_SPACE(8)
        try:
            data, ancillary, _, _ = self._connection.recvmsg(_MAX_MESSAGE, size, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            os._exit(0)
        message = json.loads(data)
        if message["verb"] == "serve":
            given = array.array("i", ancillary[0][2]) if ancillary else ()
            if len(given) == 2:  # else there was no descriptor left for them, and connections are refused
                self._admit(message, *given)
            return
        if tenant := self._tenants.get(message["id"]):
            tenant.tell_rest()
        _start(self._tell_at_last({"event": "told", "number": message["number"]}))

    def _admit(self, message: dict[str, Any], listener: int, sandbox: int) -> None:
        """Serve a sandbox until its first process, known by a pidfd, has ended."""
        name, loop = message["id"], asyncio.get_running_loop()
        tenant = _Tenant(
            name,
            rules.Rules(tuple(message["hosts"]), bool(message["private"])),
            rules.Upstream(*message["upstream"]),
            self._tell,
            self._resolvers,
        )
        tenant.serve(socket.socket(fileno=listener))
        self._tenants[name] = tenant  # after a reset it takes the place of the one before

        def ended() -> None:
            loop.remove_reader(sandbox)
            os.close(sandbox)
            tenant.close()
            if self._tenants.get(name) is tenant:
                del self._tenants[name]

        loop.add_reader(sandbox, ended)

    def _tell(self, message: dict[str, object]) -> bool:
        """Tell the controller, if it listens: nobody here waits for it."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps(message).encode())
            return True
        return False

    async def _tell_at_last(self, message: dict[str, object]) -> None:
        while not self._tell(message):
            await asyncio.sleep(0.01)


class _Tenant:
    """One sandbox.

    Args:
        name: its id.
        allowed: what it may reach.
        upstream: the proxies through which this machine reaches the world.
        tell: what tells the controller something.
        resolvers: threads that look up names.
    """

    def __init__(
        self,
        name: str,
        allowed: rules.Rules,
        upstream: rules.Upstream,
        tell: Callable[[dict[str, object]], bool],
        resolvers: ThreadPoolExecutor,
    ) -> None:
        self._name = name
        self._allowed = allowed
        self._upstream = upstream
        self._tell = tell
        self._resolvers = resolvers
        self._resolving = asyncio.Semaphore(_RESOLVERS_EACH)
        self._open: set[asyncio.Task[None]] = set()
        self._told = 0
        self._untold = 0
        self._last_told = 0.0

    def serve(self, listener: socket.socket) -> None:
        """Take connections until closed."""
        self._accepting = _start(self._accept(listener))

    def close(self) -> None:
        """End all its connections; each closes its sockets when the loop no longer looks at them."""
        self.tell_rest()
        for task in (self._accepting, *self._open):
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        with listener:
            while True:
                try:
                    client, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # it was reset before we came, or there is no descriptor left
                    await asyncio.sleep(0.1)
                    continue
                if len(self._open) < MOST_CONNECTIONS:
                    task = _start(self._converse(client))
                    self._open.add(task)
                    task.add_done_callback(self._open.discard)
                else:
                    self._turn_away(client)
                await asyncio.sleep(0)  # a sandbox that connects without end must not be the only one that is served

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _turn_away(self, client: socket.socket) -> None:
        why = f"more than {MOST_CONNECTIONS} connections at once"
        self._report(why)
        with client, contextlib.suppress(OSError):
            client.send(rules.answer("403", f"refused by minisandbox: {why}"))

    def _report(self, why: str) -> None:
        """Tell the controller of a refusal, a flood of them in part only."""
        now = asyncio.get_running_loop().time()
        message: dict[str, object] = {"event": "refused", "id": self._name, "why": why, "count": 1 + self._untold}
        if (self._told < _LINES or now >= self._last_told + 1) and self._tell(message):
            self._told, self._untold, self._last_told = self._told + 1, 0, now
        else:
            self._untold += 1

    def tell_rest(self) -> None:
        """Tell how many refusals were not told."""
        message: dict[str, object] = {"event": "refused", "id": self._name, "why": "", "count": self._untold}
        if self._untold and self._tell(message):
            self._untold = 0

    # --- one connection ----------------------------------------------------------------------------------------------

    async def _converse(self, client: socket.socket) -> None:
        with client:
            client.setblocking(False)
            try:
                async with asyncio.timeout(_HEAD_PATIENCE):
                    head, rest = await _read_head(client)
                if head:
                    await self._carry_out(client, rules.parse_request(head), rest)
            except rules.RefusedError as refused:
                self._report(str(refused))
                await _answer(client, "403", f"refused by minisandbox: {refused}")
            except _UnreachableError as error:
                await _answer(client, "502", str(error))
            except OSError:  # a timeout is one
                _reset(client)

    async def _carry_out(self, client: socket.socket, request: rules.Request, rest: bytes) -> None:
        self._allowed.check_name(request.target)
        if request.method != "CONNECT" and request.length is not None and len(rest) > request.length:
            raise rules.RefusedError(_SECOND)
        hop = self._hop(request)
        try:
            async with asyncio.timeout(_CONNECT_PATIENCE):
                if hop is None:
                    server, early = await self._connect(request.target), b""
                else:
                    server, early = await self._connect_by(hop, request)
        except TimeoutError:
            raise _UnreachableError(f"{request.target} does not answer") from None
        with server:
            async with asyncio.timeout(_IDLE_PATIENCE) as deadline:
                relay = _Relay(client, server, deadline)
                if request.method == "CONNECT":
                    opening = _Opening(request.target.host, self._allowed.expects(request.target), self._report)
                    await relay.both_ways(rest, b"HTTP/1.1 200 Connection established\r\n\r\n" + early, opening)
                else:
                    head = request.head(absolute=hop is not None, authorization=hop.authorization if hop else "")
                    await relay.one_request(head, _Body(client, rest, request.length), self._report)

    def _hop(self, request: rules.Request) -> rules.Hop | None:
        """The proxy beyond ours that a request goes to, if any; an address, at least, can be checked even then."""
        hop = self._upstream.way(request)
        if hop is not None and rules.is_address(request.target.host):
            self._allowed.check_address(request.target.host)
        return hop

    async def _connect(self, target: rules.Target) -> socket.socket:
        """Connect to an address that was checked; the name is not asked for again."""
        addresses, refused = [], None
        for address in await self._resolve(target.host):
            try:
                self._allowed.check_address(address, own=_is_own(address))
                addresses.append(address)
            except rules.RefusedError as error:
                refused = error
        if refused is not None and not addresses:
            raise rules.RefusedError(f"{target}: {refused}")
        return await _connect_any(addresses, target)

    async def _connect_by(self, hop: rules.Hop, request: rules.Request) -> tuple[socket.socket, bytes]:
        """Connect to a proxy of this machine's own choice, and have it connect on; what came early is given too."""
        server = await _connect_any(await self._resolve(hop.host), rules.Target(hop.host, hop.port))
        if request.method != "CONNECT":
            return server, b""
        try:
            lines = [f"CONNECT {request.target} HTTP/1.1", f"Host: {request.target}"]
            lines += [f"Proxy-Authorization: {hop.authorization}"] if hop.authorization else []
            await asyncio.get_running_loop().sock_sendall(server, "\r\n".join((*lines, "", "")).encode())
            head, early = await _read_head(server)
            if not rules.accepted(head):
                said = rules.shown(head.split(b"\r\n")[0])
                raise _UnreachableError(f"{request.target}: the proxy of this machine says {said}")
        except BaseException as error:  # a cancellation too
            server.close()
            if isinstance(error, OSError | rules.RefusedError):
                raise _UnreachableError(f"{request.target}: the proxy of this machine: {error}") from None
            raise
        return server, early

    async def _resolve(self, host: str) -> list[str]:
        """The addresses of a name. A name that is slow to resolve keeps others of this sandbox waiting, and no more."""
        if rules.is_address(host):
            return [host]
        await self._resolving.acquire()
        found = asyncio.get_running_loop().run_in_executor(self._resolvers, _look_up, host)
        found.add_done_callback(lambda _: self._resolving.release())  # the thread goes on when we are cancelled
        try:
            return await asyncio.shield(found)
        except OSError as error:
            raise _UnreachableError(f"{host}: {error.strerror}") from None


class _UnreachableError(Exception):
    """What was asked for is allowed and cannot be had."""


def _look_up(host: str) -> list[str]:
    # bytes: for text Python would load its codec for international names, which were spelled out long before
    found = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_own(address: str) -> bool:
    """Whether an address is one of this machine: what it would be reached from is then the same (no packet is sent)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        probe.connect((address, 9))
        return bool(probe.getsockname()[0] == address)
    return False


async def _connect_any(addresses: list[str], target: rules.Target) -> socket.socket:
    """Connect to the first address that answers; each has its share of the time."""
    why = "no address"
    for number, address in enumerate(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_CONNECT_PATIENCE / (len(addresses) - number)):
                await asyncio.get_running_loop().sock_connect(connection, (address, target.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except (OSError, TimeoutError) as error:
            connection.close()
            why = getattr(error, "strerror", None) or "does not answer"
        except BaseException:  # a cancellation too
            connection.close()
            raise
    raise _UnreachableError(f"{target}: {why}")


async def _read_head(source: socket.socket) -> tuple[bytes, bytes]:
    """Read a head; returns it without its empty line, and what came after it. Nothing: it hung up.

    Raises:
        RefusedError: it is too long, or cut off.
    """
    data = bytearray()
    while (end := data.find(b"\r\n\r\n", 0, rules.MOST_HEAD)) < 0:
        if len(data) >= rules.MOST_HEAD:
            raise rules.RefusedError(f"a head of more than {rules.MOST_HEAD} bytes")
        piece = await asyncio.get_running_loop().sock_recv(source, _CHUNK)
        if not piece and data:
            raise rules.RefusedError("a head that is cut off")
        if not piece:
            return b"", b""
        data += piece
    if not end:
        raise rules.RefusedError("a head without a request line")
    return bytes(data[:end]), bytes(data[end + 4 :])


async def _answer(client: socket.socket, status: str, why: str) -> None:
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LINGER):
            await asyncio.get_running_loop().sock_sendall(client, rules.answer(status, why))
    await _finish(client)


async def _finish(client: socket.socket) -> None:
    """Close our side and take what still comes for a moment: unread, it would turn our answer into a reset (tcp(7))."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER):
            for _ in range(_MOST_LEFT):
                if not await asyncio.get_running_loop().sock_recv(client, _CHUNK):
                    break


def _reset(connection: socket.socket) -> None:
    """Let the peer know that what it got is not all: the close that follows is a reset (socket(7), SO_LINGER)."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)  # the loop alone would not keep it (asyncio.create_task)
    task.add_done_callback(_tasks.discard)
    return task


_tasks: set[asyncio.Task[None]] = set()


class _Body:
    """The body of a request, as it is sent on.

    Args:
        source: where it comes from.
        data: what has come already.
        length: how long it is; None for one in chunks.
    """

    def __init__(self, source: socket.socket, data: bytes, length: int | None) -> None:
        self._source = source
        self._data = data
        self._length = length

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, and then a look at whether more comes, which no request may be followed by.

        Raises:
            EOFError: it was cut off.
            RefusedError: it is malformed, or more comes.
        """
        async for piece in self._chunks() if self._length is None else self._counted(self._length):
            yield piece
        with contextlib.suppress(EOFError):
            if not self._data:
                await self._fill()
            raise rules.RefusedError(_SECOND)

    async def _counted(self, count: int) -> AsyncIterator[bytes]:
        while count:
            if not self._data:
                await self._fill()
            piece, self._data = self._data[:count], self._data[count:]
            count -= len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := rules.chunk_size(await self._line()):
            yield f"{size:x}\r\n".encode()
            async for piece in self._counted(size):
                yield piece
            yield b"\r\n"
            if await self._line():
                raise rules.RefusedError("a chunk that is longer than it says")
        if await self._line():
            raise rules.RefusedError("header fields after a body")
        yield b"0\r\n\r\n"

    async def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            if len(self._data) > rules.MOST_CHUNK_LINE:
                raise rules.RefusedError("a line of a body in chunks that does not end")
            await self._fill()
        line, _, self._data = self._data.partition(b"\r\n")
        return line

    async def _fill(self) -> None:
        piece = await asyncio.get_running_loop().sock_recv(self._source, _CHUNK)
        if not piece:
            raise EOFError
        self._data += piece


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a tunnel must begin with.

    Attributes:
        host: where it goes.
        expected: what it must carry (:meth:`.proxy_rules.Rules.expects`).
        report: is told of a refusal.
    """

    host: str
    expected: str
    report: Callable[[str], None]

    async def complete(self, source: socket.socket, data: bytes) -> bytes:
        """What a client has sent, once it is enough to see what it is; nothing, if it closes without a word.

        Raises:
            EOFError: the client closed in the middle of it.
            RefusedError: it is something else.
        """
        try:
            while not rules.opens(self.expected, self.host, data):
                if piece := await asyncio.get_running_loop().sock_recv(source, _CHUNK):
                    data += piece
                elif data:
                    raise EOFError
                else:
                    break
        except rules.RefusedError as refused:
            self.report(str(refused))
            raise
        return data

    def watch(self, data: bytes) -> Callable[[bytes], None] | None:
        """What looks at each piece that the client sends from then on; None where nothing needs to.

        Args:
            data: what it has sent so far.
        """
        if self.expected != "https":
            return None
        hellos = rules.Hellos(self.host)

        def look(piece: bytes) -> None:
            try:
                hellos.look(piece)
            except rules.RefusedError as refused:
                self.report(str(refused))
                raise

        look(data)
        return look


class _Relay:
    """Bytes between a client and a server; where nothing moves for a while, both are cut off.

    Args:
        client: the sandbox's connection.
        server: ours to the world.
        deadline: what is moved on with each piece.
    """

    def __init__(self, client: socket.socket, server: socket.socket, deadline: asyncio.Timeout) -> None:
        self._client = client
        self._server = server
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()

    async def both_ways(self, to_server: bytes, to_client: bytes, opening: _Opening) -> None:
        """Carry everything until both have closed their sides, and first what is given."""
        try:
            await self._send(self._client, to_client)
            begun = await opening.complete(self._client, to_server)
            watch = opening.watch(begun)
            await self._send(self._server, begun)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(self._client, self._server, watch))
                group.create_task(self._copy(self._server, self._client))
        except* (OSError, EOFError, rules.RefusedError):
            _reset(self._client)

    async def one_request(self, head: bytes, body: _Body, report: Callable[[str], None]) -> None:
        """Carry one request there and all that comes back."""
        try:
            await self._send(self._server, head)
            async with asyncio.TaskGroup() as group:
                there = group.create_task(self._pass_body(body, report))
                await self._copy(self._server, self._client)
                there.cancel()
            await _finish(self._client)
        except* (OSError, EOFError, rules.RefusedError):
            _reset(self._client)

    async def _pass_body(self, body: _Body, report: Callable[[str], None]) -> None:
        try:
            async for piece in body.pieces():
                with contextlib.suppress(OSError):  # a server that has answered need not read all
                    await self._send(self._server, piece)
        except rules.RefusedError as refused:
            report(str(refused))
            raise

    async def _copy(
        self, source: socket.socket, sink: socket.socket, watch: Callable[[bytes], None] | None = None
    ) -> None:
        while data := await self._loop.sock_recv(source, _CHUNK):
            if watch is not None:
                watch(data)
            await self._send(sink, data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    async def _send(self, sink: socket.socket, data: bytes) -> None:
        await self._loop.sock_sendall(sink, data)
        self._deadline.reschedule(self._loop.time() + _IDLE_PATIENCE)
        await asyncio.sleep(0)  # others' turn, however fast these two are
