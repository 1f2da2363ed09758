"""The proxy of one sandbox: a host process that forwards connections to allowed hosts.

The sandbox has a network namespace of its own without a route. A socket made in there listens for its programs. This
process holds that socket's descriptor, accepts, and connects outwards in the host's network. Nothing of it is inside.
:mod:`.rules` decides what a request may ask for. The gateway (:mod:`.gateway`) forks a proxy at the first connection.
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
"""Connections at once."""
_MOST_FILES = 2 * MOST_CONNECTIONS + 128
"""Descriptors: two for each connection, and what this process and its lookups need."""
_MOST_UNSENT = 1 << 17
"""Bytes that wait for a slow server: the kernel would keep 4 MB per connection, which it charges to no sandbox."""
_CHUNK = 1 << 16
"""Bytes that are read at once."""
_CONNECT_PATIENCE = 10.0
_HEAD_PATIENCE = 30.0
_IDLE_PATIENCE = 300.0
_LINGER = 1.0
_MOST_LEFT = 16
_LINES = 100
"""Refusals whose reasons are all reported; after them, one reason a second."""
_RESOLVERS = 4
_RETRY = 0.1
_SECOND = "a second request on the same connection"


@dataclass(frozen=True, slots=True)
class ProxyTerms:
    """The configuration of a proxy.

    Attributes:
        allowed: what the sandbox may reach.
        upstream: the proxies through which this machine reaches the world.
        unused: seconds without a connection after which the process ends.
    """

    allowed: rules.Rules
    upstream: rules.Upstream
    unused: float


class Reports:
    """Reports of refusals: an exact counter, and messages as long as the controller reads them.

    Args:
        texts: datagram socket, not blocking.
        counter: eventfd(2).
    """

    def __init__(self, messages: socket.socket, counter: int) -> None:
        self._texts = messages
        self._counter = counter
        self._told = 0
        self._last_told = 0.0

    def filenos(self) -> set[int]:
        """Return the descriptors."""
        return {self._texts.fileno(), self._counter}

    def refused(self, why: str) -> None:
        """Report a refusal. Called before the client gets an answer, so that code which saw it finds it counted."""
        os.eventfd_write(self._counter, 1)
        now = time.monotonic()
        if self._told < _LINES or now >= self._last_told + 1:
            self._told, self._last_told = self._told + 1, now
            self.say(f"{rules.REFUSED}{why}")

    def say(self, text: str) -> None:
        """Send a text, unless the controller has too many to read."""
        with contextlib.suppress(OSError):
            self._texts.send(text.encode("ascii", "replace"))

    def close(self) -> None:
        """Close the descriptors."""
        self._texts.close()
        os.close(self._counter)


def main(terms: ProxyTerms, listener: int, reports: Reports, gateway: int) -> NoReturn:
    """Serve one sandbox until the gateway ends this process, or no program has connected for a while.

    Args:
        terms: what it is to do.
        listener: listens inside the sandbox.
        reports: where it reports refusals.
        gateway: pid of the gateway, which this process was forked from.
    """
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == gateway:  # otherwise the gateway ended before the call above
        sc.overwrite_arguments("minisandbox-network")
        _close_all_but({0, 1, 2, listener, *reports.filenos()})
        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        maximum = _MOST_FILES if maximum == resource.RLIM_INFINITY else min(maximum, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
        asyncio.run(_serve(terms, listener, reports))
    os._exit(0)


def _close_all_but(keep: set[int]) -> None:
    first = 0
    for number in sorted(keep):
        if first < number:
            sc.close_range(first, number - 1)
        first = number + 1
    sc.close_range(first)


async def _serve(terms: ProxyTerms, listener: int, reports: Reports) -> None:
    proxy = SandboxProxy(terms, reports, ThreadPoolExecutor(_RESOLVERS))
    proxy.serve(socket.socket(fileno=listener), lambda: os._exit(0))
    await asyncio.Event().wait()


class SandboxProxy:
    """The proxy of one sandbox.

    Args:
        terms: what it is to do.
        reports: where it reports refusals.
        resolvers: threads that look up names.
    """

    def __init__(self, terms: ProxyTerms, reports: Reports, resolvers: ThreadPoolExecutor) -> None:
        self._terms = terms
        self._allowed = terms.allowed
        self._reports = reports
        self._resolvers = resolvers
        self._resolving = asyncio.Semaphore(_RESOLVERS)
        self._open: set[asyncio.Task[None]] = set()

    def serve(self, listener: socket.socket, end: Callable[[], None]) -> None:
        """Accept connections.

        Args:
            listener: where they come in.
            end: called when no program has connected for a while. It is never called between a connection's accept and
                its end: what was not accepted yet stays in the listener's queue, for the gateway to see.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._end = end
        self._ending = self._loop.call_later(self._terms.unused, end)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        """Accept one connection; other work is done between two, however many a sandbox opens."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # the client reset it before we came
            return
        except OSError:  # out of descriptors
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_RETRY, self._loop.add_reader, self._listener, self._accept)
            return
        client.setblocking(False)
        if len(self._open) >= MOST_CONNECTIONS:
            why = f"more than {MOST_CONNECTIONS} connections at once"
            self._reports.refused(why)
            with client, contextlib.suppress(OSError):
                client.send(_refusal(why))
            return
        self._ending.cancel()
        task = self._loop.create_task(self._serve_client(client))
        self._open.add(task)
        task.add_done_callback(self._close)

    def _close(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not self._open:
            self._ending = self._loop.call_later(self._terms.unused, self._end)

    # --- one connection ----------------------------------------------------------------------------------------------

    async def _serve_client(self, connection: socket.socket) -> None:
        with connection:
            client = _Peer(connection)
            try:
                async with asyncio.timeout(_HEAD_PATIENCE):
                    head = await client.read_head()
                if head:
                    await self._carry_out(client, rules.parse_request(head))
            except rules.RefusedError as refused:
                self._reports.refused(str(refused))
                await client.answer(_refusal(refused.public_message))
            except _UnreachableError as error:
                await client.answer(rules.answer("502", str(error)))
            except OSError:  # a timeout is one
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
        with server.connection:
            try:
                async with asyncio.timeout(_IDLE_PATIENCE) as deadline:
                    client.deadline = server.deadline = deadline
                    if is_tunnel:
                        await self._tunnel(client, server, request.target)
                    else:
                        head = request.head(absolute=hop is not None and not hop.authorization)
                        await self._forward(client, server, head, request.length)
            except* rules.RefusedError as refused:  # too late for an answer
                self._reports.refused(str(refused.exceptions[0]))
                client.reset()
            except* OSError:
                client.reset()

    async def _tunnel(self, client: _Peer, server: _Peer, target: rules.HostPort) -> None:
        """Carry everything both ways until both have closed their sides."""
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
        """Carry one request to the server, and all that comes back."""
        await server.send(head)
        async with asyncio.TaskGroup() as group:
            body = group.create_task(_copy_body(client, server, length))
            await _copy(server, client)
            body.cancel()
        await client.finish()

    # --- the way out -------------------------------------------------------------------------------------------------

    def _hop(self, request: rules.ProxyRequest) -> rules.Hop | None:
        """Return the upstream proxy for a request, if any. An address is checked even then."""
        hop = self._terms.upstream.way(request)
        if hop is not None and rules.is_address(request.target.host):
            self._allowed.check_address(request.target.host)
        return hop

    async def _connect(self, target: rules.HostPort) -> socket.socket:
        """Connect to an address that was checked: the name is looked up once."""
        addresses, refused = [], None
        for address in await self._resolve(target.host):
            try:
                self._allowed.check_address(address, local=_is_own(address))
                addresses.append(address)
            except rules.RefusedError as error:
                refused = error
        if refused is not None and not addresses:  # code inside must not learn the host's names for addresses
            message = f"{target}: its address is refused; the sandbox's owner sees why"
            raise rules.RefusedError(f"{target}: {refused}", message)
        return await _connect_any(addresses, target)

    async def _connect_through(self, hop: rules.Hop, request: rules.ProxyRequest) -> _Peer:
        """Connect through an upstream proxy.

        With a password, plain requests use CONNECT too: in an error page for a plain request the upstream could repeat
        the password (CVE-2025-62168 of Squid). So could early data after its answer to CONNECT.
        """
        connection = await _connect_any(await self._resolve(hop.host), rules.HostPort(hop.host, hop.port))
        server = _Peer(connection)
        if request.method != "CONNECT" and not hop.authorization:
            return server
        try:
            lines = [f"CONNECT {request.target} HTTP/1.1", f"Host: {request.target}"]
            lines += [f"Proxy-Authorization: {hop.authorization}"] if hop.authorization else []
            await server.send("\r\n".join((*lines, "", "")).encode())
            if what := rules.not_a_tunnel(await server.read_head()):
                raise _UnreachableError(f"{request.target}: the proxy of this machine answers {what}")
            any_protocol = request.method == "CONNECT" and self._allowed.names_port(request.target)
            if server.data and not any_protocol:
                raise _UnreachableError(f"{request.target}: it answers before it was asked")
        except BaseException as error:  # a cancellation too
            connection.close()
            if isinstance(error, OSError | rules.RefusedError):
                raise _UnreachableError(f"{request.target}: the proxy of this machine: {error}") from None
            raise
        return server

    async def _resolve(self, host: str) -> list[str]:
        """Return the addresses of a name. Slow names delay only other lookups of this sandbox."""
        if rules.is_address(host):
            return [host]
        await self._resolving.acquire()
        try:
            lookup = asyncio.get_running_loop().run_in_executor(self._resolvers, _look_up, host)
        except RuntimeError:
            self._resolving.release()
            raise _UnreachableError(f"{host}: no thread is left to look it up") from None
        lookup.add_done_callback(lambda _: self._resolving.release())  # the thread continues when we are cancelled
        try:
            return await asyncio.shield(lookup)
        except OSError as error:
            raise _UnreachableError(f"{host}: {error.strerror}") from None


class _UnreachableError(Exception):
    """The target is allowed, but cannot be reached."""


def _refusal(why: str) -> bytes:
    return rules.answer("403", f"refused by minisandbox: {why}")


def _look_up(host: str) -> list[str]:
    # bytes: for text Python would load its codec for international names, which are encoded already
    results = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in results))


def _is_own(address: str) -> bool:
    """Return whether an address is this machine's: packets to it then come from the same address (none is sent)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        probe.connect((address, 9))
        return bool(probe.getsockname()[0] == address)
    return False


async def _connect_any(addresses: list[str], target: rules.HostPort) -> socket.socket:
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
            why = os.strerror(error.errno) if error.errno else "does not answer"  # asyncio's text has the address
        except BaseException:  # a cancellation too
            connection.close()
            raise
    raise _UnreachableError(f"{target}: {why}")


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Peer:
    """A connection to a client or a server.

    Args:
        connection: its socket, not blocking.

    Attributes:
        data: bytes that were received and not used yet.
        deadline: moved on with each piece that is sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""
        self.deadline: asyncio.Timeout | None = None
        self._loop = asyncio.get_running_loop()

    async def fill(self) -> None:
        """Receive more.

        Raises:
            ConnectionResetError: the peer closed its side.
        """
        piece = await self._loop.sock_recv(self.connection, _CHUNK)
        if not piece:
            raise ConnectionResetError
        self.data += piece

    async def read_head(self) -> bytes:
        """Receive a head; returns it without its empty line, or nothing if the peer sent nothing and hung up.

        Raises:
            RefusedError: the head is too long, or was truncated.
        """
        while (end := self.data.find(b"\r\n\r\n", 0, rules.MOST_HEAD)) < 0:
            if len(self.data) >= rules.MOST_HEAD:
                raise rules.RefusedError(f"a head of more than {rules.MOST_HEAD} bytes")
            piece = await self._loop.sock_recv(self.connection, _CHUNK)
            if not piece and self.data:
                raise rules.RefusedError("a head that is cut off")
            if not piece:
                return b""
            self.data += piece
        if not end:
            raise rules.RefusedError("a head without a request line")
        head, self.data = self.data[:end], self.data[end + 4 :]
        return head

    async def read_line(self) -> bytes:
        """Receive a line of a body in chunks."""
        while b"\r\n" not in self.data:
            if len(self.data) > rules.MOST_CHUNK_LINE:
                raise rules.RefusedError("a line of a body in chunks that does not end")
            await self.fill()
        line, _, self.data = self.data.partition(b"\r\n")
        return line

    async def read(self, count: int) -> AsyncIterator[bytes]:
        """Receive so many bytes, in pieces."""
        while count:
            if not self.data:
                await self.fill()
            piece, self.data = self.data[:count], self.data[count:]
            count -= len(piece)
            yield piece

    async def send(self, data: bytes) -> None:
        """Send everything, and let other tasks run: two fast peers must not keep the loop."""
        await self._loop.sock_sendall(self.connection, data)
        if self.deadline is not None:
            self.deadline.reschedule(self._loop.time() + _IDLE_PATIENCE)
        await asyncio.sleep(0)

    async def answer(self, data: bytes) -> None:
        """Send the last that the peer gets."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_LINGER):
                await self._loop.sock_sendall(self.connection, data)
        await self.finish()

    async def finish(self) -> None:
        """Close our side, and read for a moment: unread data would turn our answer into a reset (tcp(7))."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER):
                for _ in range(_MOST_LEFT):
                    if not await self._loop.sock_recv(self.connection, _CHUNK):
                        break

    def reset(self) -> None:
        """Have the close that follows reset the connection: the peer did not get everything (socket(7), SO_LINGER)."""
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _copy(source: _Peer, sink: _Peer) -> None:
    while data := await asyncio.get_running_loop().sock_recv(source.connection, _CHUNK):
        await sink.send(data)
    with contextlib.suppress(OSError):
        sink.connection.shutdown(socket.SHUT_WR)


async def _copy_body(client: _Peer, server: _Peer, length: int | None) -> None:
    """Send a request's body on, and refuse anything that follows it.

    Args:
        client: where it comes from.
        server: where it goes.
        length: its bytes; None for a body in chunks, which are written anew.
    """
    async for piece in _chunks(client) if length is None else client.read(length):
        with contextlib.suppress(OSError):  # a server that has answered need not read everything
            await server.send(piece)
    with contextlib.suppress(ConnectionResetError):
        if not client.data:
            await client.fill()
        raise rules.RefusedError(_SECOND)


async def _chunks(client: _Peer) -> AsyncIterator[bytes]:
    while size := rules.chunk_size(await client.read_line()):
        yield f"{size:x}\r\n".encode()
        async for piece in client.read(size):
            yield piece
        yield b"\r\n"
        if await client.read_line():
            raise rules.RefusedError("a chunk that is longer than it says")
    if await client.read_line():
        raise rules.RefusedError("header fields after a body")
    yield b"0\r\n\r\n"
