"""The controller's side of the network proxy: start it, give it sandboxes to serve, hear what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from minisandbox.errors import HostError, InvalidValue
from minisandbox.launch import proxy_rules
from minisandbox.sandbox import companion, rights
from minisandbox.types import Network, Refusals

_LOG = logging.getLogger("minisandbox.network")
# The path of the package goes by stdin: command lines are anybody's to read.
_BOOTSTRAP = (
    "import os, socket, sys; path = os.read(0, 65536).decode('utf-8', 'surrogateescape'); "
    "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, n) for n in (0, 1, 2)]; os.close(null); "
    "sys.path.append(path); from minisandbox.launch import proxy; "
    "proxy.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))"
)
_LAST = 100
_PATIENCE = 5.0


def check_network(network: Network) -> Network:
    """Refuse an allow-list that cannot be carried out here as asked.

    Raises:
        InvalidValue: it names an address that would be refused, or this machine's own proxy cannot be used.
    """
    allowed = proxy_rules.Rules(network.hosts, network.private)
    for pattern in network.hosts:
        try:
            host = proxy_rules.parse_authority(pattern.removeprefix("*."), 80).host
            if proxy_rules.is_address(host):
                allowed.check_address(host)
        except proxy_rules.RefusedError as error:
            raise InvalidValue(f"Network.allow({pattern!r}): {error}") from None
    if network.mode == "allow":
        _upstream()
    return network


def _upstream() -> proxy_rules.Upstream:
    """The proxies of the caller's environment.

    Raises:
        InvalidValue: they are of a kind that cannot be used.
    """
    upstream = proxy_rules.Upstream.of(os.environ)
    for url in filter(None, (upstream.tunnel, upstream.plain)):
        try:
            proxy_rules.parse_hop(url)
        except ValueError as error:  # without the address itself, which may hold a password
            raise InvalidValue("the proxy in https_proxy or http_proxy cannot be used", reason=str(error)) from None
    return upstream


class Gateway:
    """The proxy process of a controller, started when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proxy: _Proxy | None = None
        self._refused: dict[str, _Refused] = {}

    def serve(self, name: str, network: Network, listener: socket.socket, pidfd: int) -> None:
        """Have a sandbox's way out served until its first process ends.

        Args:
            name: its id.
            network: what it may reach.
            listener: socket that listens inside; it is closed here.
            pidfd: its first process.

        Raises:
            HostError: the proxy could not be started.
        """
        request: dict[str, object] = {
            "verb": "serve", "id": name, "hosts": network.hosts, "private": network.private,
            "upstream": [(upstream := _upstream()).tunnel, upstream.plain, upstream.bypass],
        }  # fmt: skip
        self._refused.setdefault(name, _Refused())
        with self._lock, listener:
            try:
                self._running().send(request, listener.fileno(), pidfd)
            except OSError:  # it was killed
                self._drop()
                self._begin(request, listener.fileno(), pidfd)

    def _begin(self, request: dict[str, object], *descriptors: int) -> None:
        try:
            self._running().send(request, *descriptors)
        except OSError as error:
            raise HostError(f"the network proxy does not run: {error}") from error

    def _running(self) -> _Proxy:
        if self._proxy is None:
            self._proxy = _Proxy(self._note)
        return self._proxy

    def refusals(self, name: str) -> Refusals:
        """What was refused to a sandbox so far."""
        proxy = self._proxy
        if proxy is not None and name in self._refused:
            proxy.catch_up(name)
        refused = self._refused.get(name) or _Refused()
        return Refusals(refused.count, tuple(refused.last))

    def forget(self, name: str) -> None:
        """A sandbox has ended."""
        self._refused.pop(name, None)

    def close(self) -> None:
        """End the proxy."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.close()

    def _note(self, message: dict[str, Any]) -> None:
        """Keep and log a refusal."""
        name, why, count = str(message["id"]), str(message["why"]), int(message["count"])
        if refused := self._refused.get(name):
            refused.count += count
            refused.last.extend([why] if why else [])
        more = count - bool(why)
        untold = f" ({more} more were refused)" if more else ""
        _LOG.warning("sandbox %s: refused: %s%s", name, why or "too many to tell", untold)


class _Refused:
    """What was refused to one sandbox."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[str] = deque(maxlen=_LAST)


class _Proxy:
    """One proxy process and the thread that hears what it says."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        self._note = note
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = companion.start(_BOOTSTRAP, theirs)
        except BaseException:  # a Ctrl-C too
            self._connection.close()
            raise
        self._numbers = itertools.count(1)
        self._told = 0
        self._closing = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="minisandbox-network", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, object], *descriptors: int) -> None:
        """Send a message.

        Raises:
            OSError: it has ended.
        """
        rights.send(self._connection, json.dumps(message).encode(), descriptors)

    def catch_up(self, name: str) -> None:
        """Wait until what it has refused so far was noted; where it has ended, nothing more comes."""
        number = next(self._numbers)
        with contextlib.suppress(OSError):
            self.send({"verb": "tell", "id": name, "number": number})
            with self._news:
                self._news.wait_for(lambda: self._told >= number or not self._thread.is_alive(), _PATIENCE)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._connection.recv(1 << 16):
                message = json.loads(data)
                if message["event"] == "refused":
                    self._note(message)
                else:
                    self._tell(int(message["number"]))
        if not self._closing:
            _LOG.warning("the network proxy was killed: what it served has no network any more")
        self._tell(sys.maxsize)

    def _tell(self, number: int) -> None:
        with self._news:
            self._told = max(self._told, number)
            self._news.notify_all()

    def close(self) -> None:
        """End it."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # the thread's call returns, which close(2) alone does not do
        self._thread.join(_PATIENCE)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_PATIENCE)
