"""The proxy of one sandbox: a host process that forwards connections to allowed hosts.

The sandbox has a separate network namespace without a route to the outside. Its programs connect to a listening socket
in that namespace. The proxy runs outside, holds the socket's descriptor, accepts, and connects to servers in the host's
network. :mod:`.rules` decides which requests are allowed. The gateway (:mod:`.gateway`) forks a proxy at the first
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from minisandbox.launch.kernel import syscalls as sc

from . import rules, sni

MOST_CONNECTIONS = 256
"""Maximum concurrent connections."""
_MOST_FILES = 2 * MOST_CONNECTIONS + 128
"""Maximum number of descriptors: two per connection, and more for this process and its name lookups."""
_MOST_UNSENT = 1 << 17
"""Maximum unsent bytes for a slow server. The kernel would buffer 4 MB per connection, charged to no sandbox."""
_CHUNK = 1 << 16
"""Maximum bytes per read."""
_CONNECT_PATIENCE = 10.0
_HEAD_PATIENCE = 30.0
_IDLE_PATIENCE = 300.0
_SERVER_PATIENCE = 3600.0
"""Idle timeout of connections to the sandbox's server: a model's response may come in one piece after many minutes."""
_LINGER = 1.0
_MOST_LEFT = 16
_LINES = 100
"""Number of refusals whose reasons are all reported; later reasons are limited to one per second."""
_RESOLVERS = 4
_RETRY = 0.1
_SECOND = "a second request on the same connection"


@dataclass(frozen=True, slots=True)
class ProxyTerms:
    """The configuration of a proxy.

    Attributes:
        allowed: hosts that the sandbox may reach.
        upstream: the upstream proxies of this machine.
        unused: seconds without a connection after which the proxy exits.
        server: the destination of requests to the proxy's own address; None refuses these requests.
    """

    allowed: rules.Rules
    upstream: rules.Upstream
    unused: float
    server: rules.HostPort | None = None


class Reports:
    """Reports refusals: counts all of them, and sends messages that are dropped if the controller does not read.

    Args:
        messages: non-blocking datagram socket.
        counter: descriptor of an eventfd(2).
    """

    def __init__(self, messages: socket.socket, counter: int) -> None:
        self._messages = messages
        self._counter = counter
        self._reported_count = 0
        self._last_reported = 0.0

    def filenos(self) -> set[int]:
        """Return the descriptors."""
        return {self._messages.fileno(), self._counter}

    def refused(self, reason: str) -> None:
        """Report a refusal. Call this before answering the client, so that a visible refusal is always counted."""
        os.eventfd_write(self._counter, 1)
        now = time.monotonic()
        if self._reported_count < _LINES or now >= self._last_reported + 1:
            self._reported_count, self._last_reported = self._reported_count + 1, now
            self.send(f"{rules.REFUSED}{reason}")

    def send(self, text: str) -> None:
        """Send a message, or drop it if the controller has too many unread messages."""
        with contextlib.suppress(OSError):
            self._messages.send(text.encode("ascii", "replace"))

    def close(self) -> None:
        """Close the descriptors."""
        self._messages.close()
        os.close(self._counter)


def main(terms: ProxyTerms, listener: int, reports: Reports, gateway: int) -> NoReturn:
    """Serve one sandbox until the gateway kills this process, or no program has connected for a while.

    Args:
        terms: configuration of the proxy.
        listener: listening socket inside the sandbox.
        reports: receives the reports of refusals.
        gateway: pid of the gateway, the parent of this process.
    """
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == gateway:  # else the gateway has exited before the prctl call
        sc.overwrite_arguments("minisandbox-network")
        _close_all_but({0, 1, 2, listener, *reports.filenos()})
        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        maximum = _MOST_FILES if maximum == resource.RLIM_INFINITY else min(maximum, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
        asyncio.run(_serve(terms, listener, reports))
    os._exit(0)


def _close_all_but(kept_descriptors: set[int]) -> None:
    first = 0
    for descriptor in sorted(kept_descriptors):
        if first < descriptor:
            sc.close_range(first, descriptor - 1)
        first = descriptor + 1
    sc.close_range(first)


async def _serve(terms: ProxyTerms, listener: int, reports: Reports) -> None:
    proxy = SandboxProxy(terms, reports, ThreadPoolExecutor(_RESOLVERS))
    proxy.serve(socket.socket(fileno=listener), lambda: os._exit(0))
    await asyncio.Event().wait()


class SandboxProxy:
    """The proxy of one sandbox.

    Args:
        terms: configuration of the proxy.
        reports: receives the reports of refusals.
        resolvers: threads for name lookups.
    """

    def __init__(self, terms: ProxyTerms, reports: Reports, resolvers: ThreadPoolExecutor) -> None:
        self._terms = terms
        self._allowed = terms.allowed
        self._reports = reports
        self._resolvers = resolvers
        self._resolving = asyncio.Semaphore(_RESOLVERS)
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, listener: socket.socket, on_idle: Callable[[], None]) -> None:
        """Accept connections.

        Args:
            listener: listening socket inside the sandbox.
            on_idle: called when no connection is open and no program has connected for a while. Connections that are
                not accepted yet stay in the listener's queue, where the gateway sees them.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._on_idle = on_idle
        self._idle_timer = self._loop.call_later(self._terms.unused, on_idle)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        """Accept a single connection per event, so that a flood of connections cannot block other tasks."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # the client has already reset the connection
            return
        except OSError:  # out of descriptors
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_RETRY, self._loop.add_reader, self._listener, self._accept)
            return
        client.setblocking(False)
        if len(self._tasks) >= MOST_CONNECTIONS:
            reason = f"more than {MOST_CONNECTIONS} connections at once"
            self._reports.refused(reason)
            with client, contextlib.suppress(OSError):
                client.send(_refusal(reason))
            return
        self._idle_timer.cancel()
        task = self._loop.create_task(self._serve_client(client))
        self._tasks.add(task)
        task.add_done_callback(self._close)

    def _close(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle_timer = self._loop.call_later(self._terms.unused, self._on_idle)

    # --- one connection ----------------------------------------------------------------------------------------------

    async def _serve_client(self, connection: socket.socket) -> None:
        with connection:
            client = _Peer(connection)
            try:
                async with asyncio.timeout(_HEAD_PATIENCE):
                    head = await client.read_head()
                if head:
                    await self._carry_out(client, rules.parse_request(head, server=self._terms.server))
            except rules.RefusedError as refused:
                self._reports.refused(str(refused))
                await client.answer(_refusal(refused.public_message))
            except _UnreachableError as error:
                await client.answer(rules.answer("502", str(error)))
            except OSError:  # TimeoutError is a subclass
                client.reset()

    async def _carry_out(self, client: _Peer, request: rules.ProxyRequest) -> None:
        self._allowed.check_name(request.target)
        is_tunnel = request.method == "CONNECT"
        if not is_tunnel and request.length is not None and len(client.data) > request.length:
            raise rules.RefusedError(_SECOND)
        hop = self._hop(request)
        try:
            async with asyncio.timeout(_CONNECT_PATIENCE):
                if hop is None:
                    server = _Peer(await self._connect(request.target))
                else:
                    server = await self._connect_through(hop, request)
        except TimeoutError:
            raise _UnreachableError(f"{request.target} does not answer") from None
        client.patience = server.patience = _SERVER_PATIENCE if self._terms.server else _IDLE_PATIENCE
        with server.connection:
            try:
                async with asyncio.timeout(client.patience) as deadline:
                    client.deadline = server.deadline = deadline
                    if is_tunnel:
                        await self._tunnel(client, server, request.target)
                    else:
                        head = request.head(absolute=hop is not None and not hop.authorization)
                        await self._forward(client, server, head, request.length)
            except* rules.RefusedError as refused:  # too late to answer the client
                self._reports.refused(str(refused.exceptions[0]))
                client.reset()
            except* OSError:
                client.reset()

    async def _tunnel(self, client: _Peer, server: _Peer, target: rules.HostPort) -> None:
        """Copy data in both directions until both peers have closed."""
        await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        if target.port == rules.HTTPS and not self._allowed.names_port(target):
            while not sni.is_complete(client.data, target):
                await client.fill()
        await server.send(client.data)
        await client.send(server.data)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(client, server))
            group.create_task(_copy(server, client))

    async def _forward(self, client: _Peer, server: _Peer, head: bytes, length: int | None) -> None:
        """Forward one request to the server, and its response to the client."""
        await server.send(head)
        async with asyncio.TaskGroup() as group:
            body = group.create_task(_copy_body(client, server, length))
            await _copy(server, client)
            body.cancel()
        await client.finish()

    # --- outgoing ----------------------------------------------------------------------------------------------------

    def _hop(self, request: rules.ProxyRequest) -> rules.Hop | None:
        """Return the upstream proxy for a request, or None; check a target that is an IP address even with a proxy."""
        hop = self._terms.upstream.proxy_for(request)
        if hop is not None and rules.is_address(request.target.host):
            self._allowed.check_address(request.target.host)
        return hop

    async def _connect(self, target: rules.HostPort) -> socket.socket:
        """Look up the target once, check its addresses, and connect to one that is allowed."""
        addresses, refusal = [], None
        for address in await self._resolve(target.host):
            try:
                self._allowed.check_address(address, is_local=_is_own(address))
                addresses.append(address)
            except rules.RefusedError as error:
                refusal = error
        if refusal is not None and not addresses:  # the response must not reveal the address of a name on the host
            message = f"{target}: its address is refused; the sandbox's owner sees why"
            raise rules.RefusedError(f"{target}: {refusal}", message)
        return await _connect_any(addresses, target)

    async def _connect_through(self, hop: rules.Hop, request: rules.ProxyRequest) -> _Peer:
        """Connect through an upstream proxy.

        With a password, plain requests use CONNECT too, because the upstream could repeat the password in an error page
        for a plain request (CVE-2025-62168 of Squid). Early data after its response to CONNECT is refused, because it
        could contain the password too.
        """
        connection = await _connect_any(await self._resolve(hop.host), rules.HostPort(hop.host, hop.port))
        server = _Peer(connection)
        if request.method != "CONNECT" and not hop.authorization:
            return server
        try:
            lines = [f"CONNECT {request.target} HTTP/1.1", f"Host: {request.target}"]
            lines += [f"Proxy-Authorization: {hop.authorization}"] if hop.authorization else []
            await server.send("\r\n".join((*lines, "", "")).encode())
            if failure := rules.not_a_tunnel(await server.read_head()):
                raise _UnreachableError(f"{request.target}: the proxy of this machine answers {failure}")
            any_protocol = request.method == "CONNECT" and self._allowed.names_port(request.target)
            if server.data and not any_protocol:
                raise _UnreachableError(f"{request.target}: it answers before it was asked")
        except BaseException as error:  # even on cancellation
            connection.close()
            if isinstance(error, OSError | rules.RefusedError):
                raise _UnreachableError(f"{request.target}: the proxy of this machine: {error}") from None
            raise
        return server

    async def _resolve(self, host: str) -> list[str]:
        """Return the addresses of a name. Slow lookups delay only other lookups of this sandbox."""
        if rules.is_address(host):
            return [host]
        await self._resolving.acquire()
        try:
            lookup = asyncio.get_running_loop().run_in_executor(self._resolvers, _look_up, host)
        except RuntimeError:
            self._resolving.release()
            raise _UnreachableError(f"{host}: no thread is left to look it up") from None
        lookup.add_done_callback(lambda _: self._resolving.release())  # a cancellation does not stop the thread
        try:
            return await asyncio.shield(lookup)
        except OSError as error:
            raise _UnreachableError(f"{host}: {error.strerror}") from None


class _UnreachableError(Exception):
    """The target is allowed, but cannot be reached."""


def _refusal(reason: str) -> bytes:
    return rules.answer("403", f"refused by minisandbox: {reason}")


def _look_up(host: str) -> list[str]:
    # pass bytes, because Python would load its IDNA codec for a string, and the name is already encoded
    results = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in results))


def _is_own(address: str) -> bool:
    """Return whether an address belongs to this machine; the kernel then uses the same address as source."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as udp_socket:
        udp_socket.connect((address, 9))
        return bool(udp_socket.getsockname()[0] == address)
    return False


async def _connect_any(addresses: list[str], target: rules.HostPort) -> socket.socket:
    """Connect to the first address that answers; the remaining time is divided among the remaining addresses."""
    reason = "no address"
    for index, address in enumerate(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_CONNECT_PATIENCE / (len(addresses) - index)):
                await asyncio.get_running_loop().sock_connect(connection, (address, target.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
            return connection
        except (OSError, TimeoutError) as error:
            connection.close()
            # strerror, because asyncio's message contains the address
            reason = os.strerror(error.errno) if error.errno else "does not answer"
        except BaseException:  # even on cancellation
            connection.close()
            raise
    raise _UnreachableError(f"{target}: {reason}")


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Peer:
    """A connection to a client or a server.

    Args:
        connection: its non-blocking socket.

    Attributes:
        data: received bytes that no method has consumed yet.
        deadline: idle timeout, which is extended with each piece that is sent.
        patience: seconds of the idle timeout.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""
        self.deadline: asyncio.Timeout | None = None
        self.patience = _IDLE_PATIENCE
        self._loop = asyncio.get_running_loop()

    async def fill(self) -> None:
        """Receive more data.

        Raises:
            ConnectionResetError: the peer has closed its side.
        """
        chunk = await self._loop.sock_recv(self.connection, _CHUNK)
        if not chunk:
            raise ConnectionResetError
        self.data += chunk

    async def read_head(self) -> bytes:
        """Receive a head and return it without its empty line, or b"" if the peer closed without sending data.

        Raises:
            RefusedError: the head is too long or truncated.
        """
        while (head_size := self.data.find(b"\r\n\r\n", 0, rules.MOST_HEAD)) < 0:
            if len(self.data) >= rules.MOST_HEAD:
                raise rules.RefusedError(f"a head of more than {rules.MOST_HEAD} bytes")
            chunk = await self._loop.sock_recv(self.connection, _CHUNK)
            if not chunk and self.data:
                raise rules.RefusedError("a head that is cut off")
            if not chunk:
                return b""
            self.data += chunk
        if not head_size:
            raise rules.RefusedError("a head without a request line")
        head, self.data = self.data[:head_size], self.data[head_size + 4 :]
        return head

    async def read_line(self) -> bytes:
        """Receive a line of a chunked body."""
        while b"\r\n" not in self.data:
            if len(self.data) > rules.MOST_CHUNK_LINE:
                raise rules.RefusedError("a line of a body in chunks that does not end")
            await self.fill()
        line, _, self.data = self.data.partition(b"\r\n")
        return line

    async def read(self, count: int) -> AsyncIterator[bytes]:
        """Receive this many bytes, in pieces."""
        while count:
            if not self.data:
                await self.fill()
            chunk, self.data = self.data[:count], self.data[count:]
            count -= len(chunk)
            yield chunk

    async def send(self, data: bytes) -> None:
        """Send all data, then yield to other tasks, because two fast peers must not monopolise the event loop."""
        await self._loop.sock_sendall(self.connection, data)
        if self.deadline is not None:
            self.deadline.reschedule(self._loop.time() + self.patience)
        await asyncio.sleep(0)

    async def answer(self, data: bytes) -> None:
        """Send a final response and close the connection."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_LINGER):
                await self._loop.sock_sendall(self.connection, data)
        await self.finish()

    async def finish(self) -> None:
        """Close the sending side, and read briefly, because unread data would turn the close into a reset (tcp(7))."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER):
                for _ in range(_MOST_LEFT):
                    if not await self._loop.sock_recv(self.connection, _CHUNK):
                        break

    def reset(self) -> None:
        """Make close() reset the connection, so that the peer notices missing data (socket(7), SO_LINGER)."""
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _copy(source: _Peer, sink: _Peer) -> None:
    while data := await asyncio.get_running_loop().sock_recv(source.connection, _CHUNK):
        await sink.send(data)
    with contextlib.suppress(OSError):
        sink.connection.shutdown(socket.SHUT_WR)


async def _copy_body(client: _Peer, server: _Peer, length: int | None) -> None:
    """Forward the body of a request, and refuse any data after it.

    Args:
        client: peer to read the body from.
        server: peer to send the body to.
        length: bytes of the body; None for a chunked body, whose chunk lines are written anew.
    """
    async for chunk in _chunks(client) if length is None else client.read(length):
        with contextlib.suppress(OSError):  # a server may answer without reading the whole body
            await server.send(chunk)
    with contextlib.suppress(ConnectionResetError):
        if not client.data:
            await client.fill()
        raise rules.RefusedError(_SECOND)


async def _chunks(client: _Peer) -> AsyncIterator[bytes]:
    while size := rules.chunk_size(await client.read_line()):
        yield f"{size:x}\r\n".encode()
        async for chunk in client.read(size):
            yield chunk
        yield b"\r\n"
        if await client.read_line():
            raise rules.RefusedError("a chunk that is longer than it says")
    if await client.read_line():
        raise rules.RefusedError("header fields after a body")
    yield b"0\r\n\r\n"
