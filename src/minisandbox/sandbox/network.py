"""Start the network gateway, register sandboxes with an allow-list, and collect refused requests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import threading
from collections import deque

from minisandbox.egress import rules
from minisandbox.errors import HostError, InvalidValue
from minisandbox.host.descriptors import hold_streams
from minisandbox.sandbox import fd_passing, helper_process
from minisandbox.types import Network, Refusals

_LOG = logging.getLogger("minisandbox.network")
UNUSED = 60.0
"""Seconds without a connection after which a sandbox's proxy exits; the next connection starts a new proxy."""
_LAST = 100
"""Number of refusals per sandbox whose reasons are kept."""
_MOST_TEXT = 1 << 15
_PATIENCE = 5.0


def check_network(network: Network) -> Network:
    """Check that an allow-list can be enforced on this machine.

    Raises:
        InvalidValue: the network names an address that would be refused, or the host's own proxy is not supported.
    """
    allow_rules = rules.Rules(network.hosts, network.private)
    for pattern in network.hosts:
        try:
            host = rules.parse_authority(pattern.removeprefix("*.").replace("*", "any"), 80).host
            if rules.is_address(host):
                allow_rules.check_address(host)
        except rules.RefusedError as error:
            raise InvalidValue(f"Network.allow({pattern!r}): {error}") from None
    if network.mode == "allow":
        _upstream()
    return network


def _upstream() -> rules.Upstream:
    """Return the upstream proxies named by this process's environment variables.

    Raises:
        InvalidValue: a proxy is of an unsupported kind.
    """
    upstream = rules.Upstream.of(os.environ)
    for url in filter(None, (upstream.tunnel, upstream.plain)):
        try:
            rules.parse_hop(url)
        except ValueError as error:  # leave out the address, which may contain a password
            raise InvalidValue("the proxy in https_proxy or http_proxy cannot be used", reason=str(error)) from None
    return upstream


class Gateway:
    """Starts the gateway process at its first use, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._refusals: dict[str, _Refusals] = {}

    def serve(self, name: str, network: Network, listener: socket.socket, pidfd: int) -> None:
        """Register a sandbox with the gateway until the sandbox's pid 1 exits.

        Args:
            name: id of the sandbox.
            network: hosts that the sandbox may reach.
            listener: socket that listens inside the sandbox; this method closes it.
            pidfd: pidfd of the sandbox's pid 1.

        Raises:
            HostError: the gateway could not be started or reached.
        """
        upstream = _upstream()
        request = {
            "id": name, "hosts": network.hosts, "private": network.private, "server": network.server,
            "unused": UNUSED,
            "upstream": [upstream.tunnel, upstream.plain, upstream.bypass],
        }  # fmt: skip
        with self._lock, listener:
            if (refusals := self._refusals.get(name)) is None:
                refusals = self._refusals[name] = _Refusals(name)
            for is_last in (False, True):
                try:
                    if self._process is None:
                        self._process = _Process()
                    self._process.serve(json.dumps(request).encode(), listener.fileno(), pidfd, refusals)
                    return
                except TimeoutError:  # raised by a signal handler of the caller: this method has no timeout
                    raise
                except OSError as error:
                    if is_last or not isinstance(error, ConnectionError):
                        raise HostError(f"the network's gateway cannot be reached: {error}") from error
                    self._drop()  # the gateway was killed

    def refusals(self, name: str) -> Refusals:
        """Return the refused requests of a sandbox so far."""
        refusals = self._refusals.get(name)
        return refusals.collect() if refusals is not None else Refusals()

    def forget(self, name: str) -> None:
        """Release the resources of a stopped sandbox."""
        with self._lock:
            if (refusals := self._refusals.pop(name, None)) is not None:
                if self._process is not None:
                    self._process.unwatch(refusals)
                refusals.close()

    def close(self) -> None:
        """Stop the gateway and all its proxies."""
        with self._lock:
            self._drop()
            for refusals in self._refusals.values():
                refusals.close()
            self._refusals.clear()

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


class _Refusals:
    """Counts the refused requests of one sandbox, including those of earlier runs.

    The sandbox's proxies report a refusal before they answer the client inside: they increment an eventfd and send the
    reason to a socket. So the counter and the reasons are complete as soon as a client sees a refusal.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # reentrant: a logging handler may call collect()
        self._count = 0
        self._reasons: deque[str] = deque(maxlen=_LAST)
        self.messages, self.reporters = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self.counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def collect(self) -> Refusals:
        """Read pending reports, log them, and return all refusals so far."""
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(OSError):
                    while message := self.messages.recv(_MOST_TEXT).decode("ascii", "replace"):
                        _LOG.warning("sandbox %s: %s", self._name, message)
                        if message.startswith(rules.REFUSED):
                            self._reasons.append(message.removeprefix(rules.REFUSED))
                with contextlib.suppress(OSError):
                    self._count += os.eventfd_read(self.counter)
            return Refusals(self._count, tuple(self._reasons))

    def close(self) -> None:
        """Close its descriptors."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.messages.close()
                self.reporters.close()
                os.close(self.counter)


class _Process:
    """One gateway process, and the thread that logs its reports and those of its proxies."""

    def __init__(self) -> None:
        hold_streams()
        self._connection, gateway_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with gateway_end:
                self._process = helper_process.start(helper_process.bootstrap("egress.gateway"), gateway_end)
            self._epoll = select.epoll()
        except BaseException:  # even on Ctrl-C
            self._connection.close()
            raise
        self._epoll.register(self._connection, select.EPOLLIN)
        self._watched: dict[int, _Refusals] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="minisandbox-gateway", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def serve(self, request: bytes, listener: int, pidfd: int, refusals: _Refusals) -> None:
        """Register a sandbox with the gateway process, and watch its refusals.

        Raises:
            OSError: the gateway has exited.
        """
        descriptors = (listener, pidfd, refusals.reporters.fileno(), refusals.counter)
        fd_passing.send(self._connection, request, descriptors)
        descriptor = refusals.messages.fileno()
        if self._watched.get(descriptor) is not refusals:
            self._watched[descriptor] = refusals
            self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, refusals: _Refusals) -> None:
        """Stop logging the refusals of a sandbox."""
        if self._watched.pop(descriptor := refusals.messages.fileno(), None) is not None:
            self._epoll.unregister(descriptor)

    def _listen(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor != self._connection.fileno():
                    if (refusals := self._watched.get(descriptor)) is not None:
                        refusals.collect()
                elif not self._hear():
                    return

    def _hear(self) -> bool:
        """Log a message of the gateway itself; return whether the gateway is alive."""
        with contextlib.suppress(OSError):
            if name := self._connection.recv(_MOST_TEXT):
                reason = "it has no network, for its gateway has no file descriptor left (ulimit -n)"
                _LOG.warning("sandbox %s: %s", name.decode("ascii", "replace"), reason)
                return True
        if not self._closing:
            _LOG.warning("the network's gateway was killed: what it served has no network any more")
        return False

    def close(self) -> None:
        """Stop the gateway process and the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, unlike close(2)
        self._thread.join(_PATIENCE)
        self._connection.close()
        self._epoll.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper_process.end(self._process)
