"""The network proxy of one sandbox: a process of the host through which it reaches what it was allowed.

The sandbox has a network of its own without a route. A socket that was made in there listens for its programs; this
process holds the descriptor, accepts, and connects outwards in the host's network. Nothing of it is inside. What a
request may ask for is decided in :mod:`.rules`. The gateway (:mod:`.gateway`) forks it at the first connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

from minisandbox.launch.kernel import syscalls as sc

from . import rules
from .proxy_body import CHUNK, SECOND, Body
from .tunnels import Hellos, opens

TELL, TOLD = b"tell", b"told"
"""What the gateway asks, and the answer once everything was told; all else that a proxy says is JSON."""
MOST_MESSAGE = 1 << 15
"""Bytes of a message to the gateway."""
MOST_CONNECTIONS = 256
"""Connections at once."""
_MOST_FILES = 2 * MOST_CONNECTIONS + 128
"""Descriptors: two for each connection, and what this process and its lookups need."""
_MOST_UNSENT = 1 << 17
"""Bytes that wait to be sent to a server that does not read: the kernel would keep 4 MB, for nobody's account."""
_CONNECT_PATIENCE = 10.0
_HEAD_PATIENCE = 30.0
_IDLE_PATIENCE = 300.0
_LINGER = 1.0
_MOST_LEFT = 16
_LINES = 100
"""Refusals that are told one by one; after them, one a second."""
_RESOLVERS = 4
_REST = 0.1


@dataclass(frozen=True, slots=True)
class Terms:
    """What a proxy is to do.

    Attributes:
        allowed: what the sandbox may reach.
        upstream: the proxies through which this machine reaches the world.
        unused: seconds without a connection after which the process ends.
    """

    allowed: rules.Rules
    upstream: rules.Upstream
    unused: float


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a proxy holds of what its gateway has; everything else it closes.

    Attributes:
        gateway: socket to the gateway.
        listener: listens inside the sandbox.
        sandbox: pidfd of the sandbox's first process.
        controller: pidfd of the controller.
    """

    gateway: int
    listener: int
    sandbox: int
    controller: int


def main(terms: Terms, held: Descriptors, gateway: int) -> NoReturn:
    """Serve one sandbox until it ends, the controller or the gateway ends, or nobody has used it for a while.

    Args:
        terms: what it is to do.
        held: its descriptors.
        gateway: pid of the gateway, which this process was forked from.
    """
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == gateway:  # else it has ended before it was asked for
        sc.overwrite_arguments("minisandbox-network")
        _close_all_but({0, 1, 2, held.gateway, held.listener, held.sandbox, held.controller})
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        asyncio.run(_serve(terms, held))
    os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    first = 0
    for number in sorted(kept):
        if first < number:
            sc.close_range(first, number - 1)
        first = number + 1
    sc.close_range(first)


async def _serve(terms: Terms, held: Descriptors) -> None:
    loop, gateway = asyncio.get_running_loop(), socket.socket(fileno=held.gateway)
    gateway.setblocking(False)

    def tell(message: bytes) -> bool:
        """Tell the controller, if it listens: nobody here waits for it."""
        with contextlib.suppress(OSError):
            gateway.send(message)
            return True
        return False

    def end() -> None:
        tenant.tell_rest()
        os._exit(0)

    def take_question() -> None:
        with contextlib.suppress(OSError):
            if not gateway.recv(len(TELL)):
                os._exit(0)
            _start(tenant.tell_all())

    tenant = _Tenant(terms.allowed, terms.upstream, tell, ThreadPoolExecutor(_RESOLVERS))
    loop.add_reader(held.controller, os._exit, 0)
    loop.add_reader(held.sandbox, end)
    loop.add_reader(gateway, take_question)
    tenant.serve(socket.socket(fileno=held.listener), terms.unused, end)
    await asyncio.Event().wait()


class _Tenant:
    """The sandbox.

    Args:
        allowed: what it may reach.
        upstream: the proxies through which this machine reaches the world.
        tell: what tells the controller something.
        resolvers: threads that look up names.
    """

    def __init__(
        self,
        allowed: rules.Rules,
        upstream: rules.Upstream,
        tell: Callable[[bytes], bool],
        resolvers: ThreadPoolExecutor,
    ) -> None:
        self._allowed = allowed
        self._upstream = upstream
        self._tell = tell
        self._resolvers = resolvers
        self._resolving = asyncio.Semaphore(_RESOLVERS)
        self._open: set[asyncio.Task[None]] = set()
        self._told = 0
        self._untold = 0
        self._last_told = 0.0

    def serve(self, listener: socket.socket, unused: float, end: Callable[[], None]) -> None:
        """Take connections.

        Args:
            listener: where they come in.
            unused: seconds without one after which it ends.
            end: ends it. It is not called between a connection's accept and its end: what was not accepted yet stays
                in the queue of the listening socket, for the gateway to see.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._unused, self._end = unused, end
        self._ending = self._loop.call_later(unused, self._end_unused)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        """Take one connection: a sandbox that connects without end must not be all that is served."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # it was reset before we came
            return
        except OSError:  # there is no descriptor left
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_REST, self._loop.add_reader, self._listener, self._accept)
            return
        if len(self._open) >= MOST_CONNECTIONS:
            self._turn_away(client)
            return
        self._ending.cancel()
        task = _start(self._converse(client))
        self._open.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not self._open:
            self._ending = self._loop.call_later(self._unused, self._end_unused)

    def _end_unused(self) -> None:
        if self.tell_rest():
            self._end()
        else:
            self._ending = self._loop.call_later(_REST, self._end_unused)

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _turn_away(self, client: socket.socket) -> None:
        why = f"more than {MOST_CONNECTIONS} connections at once"
        self._report(why)
        with client, contextlib.suppress(OSError):
            client.setblocking(False)
            client.send(rules.answer("403", f"refused by minisandbox: {why}"))

    def _report(self, why: str) -> None:
        """Tell the controller of a refusal, a flood of them in part only."""
        now = asyncio.get_running_loop().time()
        if (self._told < _LINES or now >= self._last_told + 1) and self._tell(_refusal(why, 1 + self._untold)):
            self._told, self._untold, self._last_told = self._told + 1, 0, now
        else:
            self._untold += 1

    def tell_rest(self) -> bool:
        """Tell how many refusals were not told; returns whether all are now."""
        if self._untold and self._tell(_refusal("", self._untold)):
            self._untold = 0
        return not self._untold

    async def tell_all(self) -> None:
        """Tell what was not told, and then that this is all."""
        while not (self.tell_rest() and self._tell(TOLD)):
            await asyncio.sleep(0.01)

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
                await _answer(client, "403", f"refused by minisandbox: {refused.told}")
            except _UnreachableError as error:
                await _answer(client, "502", str(error))
            except OSError:  # a timeout is one
                _reset(client)

    async def _carry_out(self, client: socket.socket, request: rules.Request, rest: bytes) -> None:
        self._allowed.check_name(request.target)
        if request.method != "CONNECT" and request.length is not None and len(rest) > request.length:
            raise rules.RefusedError(SECOND)
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
                    await relay.both_ways(rest, early, opening)
                else:
                    head = request.head(absolute=hop is not None and not hop.authorization)
                    await relay.one_request(head, Body(client, rest, request.length), self._report)

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
            told = (
                f"{target}: its address is refused, and the sandbox's owner is told why"  # not what it is called here
            )
            raise rules.RefusedError(f"{target}: {refused}", told)
        return await _connect_any(addresses, target)

    async def _connect_by(self, hop: rules.Hop, request: rules.Request) -> tuple[socket.socket, bytes]:
        """Connect to a proxy of this machine's own choice, and have it connect on; what came early is given too.

        One that wants a password connects on for plain requests too: in its own answer to one it could repeat, as
        pages of errors do, what it was sent (CVE-2025-62168 of Squid). So could what it says before it was asked.
        """
        server = await _connect_any(await self._resolve(hop.host), rules.Target(hop.host, hop.port))
        if request.method != "CONNECT" and not hop.authorization:
            return server, b""
        try:
            lines = [f"CONNECT {request.target} HTTP/1.1", f"Host: {request.target}"]
            lines += [f"Proxy-Authorization: {hop.authorization}"] if hop.authorization else []
            await asyncio.get_running_loop().sock_sendall(server, "\r\n".join((*lines, "", "")).encode())
            head, early = await _read_head(server)
            if what := rules.not_a_tunnel(head):  # its words could repeat ours
                raise _UnreachableError(f"{request.target}: the proxy of this machine answers {what}")
            if early and (request.method != "CONNECT" or self._allowed.expects(request.target)):
                raise _UnreachableError(f"{request.target}: it answers before it was asked")
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
        try:
            found = asyncio.get_running_loop().run_in_executor(self._resolvers, _look_up, host)
        except RuntimeError:
            self._resolving.release()
            raise _UnreachableError(f"{host}: no thread is left to look it up") from None
        found.add_done_callback(lambda _: self._resolving.release())  # the thread goes on when we are cancelled
        try:
            return await asyncio.shield(found)
        except OSError as error:
            raise _UnreachableError(f"{host}: {error.strerror}") from None


def _refusal(why: str, count: int) -> bytes:
    return json.dumps({"why": why, "count": count}).encode()


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
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
            return connection
        except (OSError, TimeoutError) as error:
            connection.close()
            why = os.strerror(error.errno) if error.errno else "does not answer"  # asyncio's own words have the address
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
        piece = await asyncio.get_running_loop().sock_recv(source, CHUNK)
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
                if not await asyncio.get_running_loop().sock_recv(client, CHUNK):
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


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a tunnel must begin with.

    Attributes:
        host: where it goes.
        expected: what it must carry (:meth:`.rules.Rules.expects`).
        report: is told of a refusal.
    """

    host: str
    expected: str
    report: Callable[[str], None]

    async def complete(self, source: socket.socket, data: bytes) -> bytes:
        """What a client has sent, once it is enough to see what it is.

        Raises:
            EOFError: the client closed before that.
            RefusedError: it is something else.
        """
        try:
            while not opens(self.expected, self.host, data):
                piece = await asyncio.get_running_loop().sock_recv(source, CHUNK)
                if not piece:
                    raise EOFError
                data += piece
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
        hellos = Hellos(self.host)

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
        """Carry everything until both have closed their sides; nothing of the server's before it may be what it is."""
        try:
            await self._send(self._client, b"HTTP/1.1 200 Connection established\r\n\r\n")
            begun = await opening.complete(self._client, to_server)
            watch = opening.watch(begun)
            await self._send(self._server, begun)
            await self._send(self._client, to_client)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(self._client, self._server, watch))
                group.create_task(self._copy(self._server, self._client))
        except* (OSError, EOFError, rules.RefusedError):
            _reset(self._client)

    async def one_request(self, head: bytes, body: Body, report: Callable[[str], None]) -> None:
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

    async def _pass_body(self, body: Body, report: Callable[[str], None]) -> None:
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
        while data := await self._loop.sock_recv(source, CHUNK):
            if watch is not None:
                watch(data)
            await self._send(sink, data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    async def _send(self, sink: socket.socket, data: bytes) -> None:
        await self._loop.sock_sendall(sink, data)
        self._deadline.reschedule(self._loop.time() + _IDLE_PATIENCE)
        await asyncio.sleep(0)  # others' turn, however fast these two are
