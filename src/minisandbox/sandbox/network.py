"""The controller's side of the way out: start the gateway, give it sandboxes to serve, hear what was refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from minisandbox.egress import rules
from minisandbox.errors import HostError, InvalidValue
from minisandbox.host.descriptors import hold_streams
from minisandbox.sandbox import companion, rights, wire
from minisandbox.types import Network, Refusals

_LOG = logging.getLogger("minisandbox.network")
# The path of the package goes by stdin: command lines are anybody's to read.
_BOOTSTRAP = (
    "import os, socket, sys; path = os.read(0, 65536).decode('utf-8', 'surrogateescape'); "
    "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, n) for n in (0, 1, 2)]; os.close(null); "
    "sys.path.append(path); from minisandbox.egress import gateway; "
    "gateway.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))"
)
UNUSED = 60.0
"""Seconds without a connection after which a sandbox's proxy ends; the next connection starts another."""
_EVENTS = {
    "killed": "sandbox %s: its network proxy was killed: open connections are cut off, the next one starts another",
    "full": "sandbox %s: it has no network, for its gateway has no file descriptor left (ulimit -n)",
}
_LAST = 100
_PATIENCE = 5.0
_LONGEST_TELLING = 30.0
"""Seconds: proxies answer when what they have told was noted, which takes its time on a busy machine."""


def check_network(network: Network) -> Network:
    """Refuse an allow-list that cannot be carried out here as asked.

    Raises:
        InvalidValue: it names an address that would be refused, or this machine's own proxy cannot be used.
    """
    allowed = rules.Rules(network.hosts, network.private)
    for pattern in network.hosts:
        try:
            host = rules.parse_authority(pattern.removeprefix("*."), 80).host
            if rules.is_address(host):
                allowed.check_address(host)
        except rules.RefusedError as error:
            raise InvalidValue(f"Network.allow({pattern!r}): {error}") from None
    if network.mode == "allow":
        _upstream()
    return network


def _upstream() -> rules.Upstream:
    """The proxies of the caller's environment.

    Raises:
        InvalidValue: they are of a kind that cannot be used.
    """
    upstream = rules.Upstream.of(os.environ)
    for url in filter(None, (upstream.tunnel, upstream.plain)):
        try:
            rules.parse_hop(url)
        except ValueError as error:  # without the address itself, which may hold a password
            raise InvalidValue("the proxy in https_proxy or http_proxy cannot be used", reason=str(error)) from None
    return upstream


class Gateway:
    """The gateway process of this process, started when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._refused: dict[str, _Refused] = {}

    def serve(self, name: str, network: Network, listener: socket.socket, pidfd: int) -> None:
        """Have a sandbox's way out served until its first process ends.

        Args:
            name: its id.
            network: what it may reach.
            listener: socket that listens inside; it is closed here.
            pidfd: its first process.

        Raises:
            HostError: the gateway could not be started, or asked.
        """
        request: dict[str, object] = {
            "verb": "serve", "id": name, "hosts": network.hosts, "private": network.private, "unused": UNUSED,
            "upstream": [(upstream := _upstream()).tunnel, upstream.plain, upstream.bypass],
        }  # fmt: skip
        self._refused.setdefault(name, _Refused())
        with self._lock, listener:
            for is_last in (False, True):
                try:
                    self._running().send(request, listener.fileno(), pidfd)
                    return
                except TimeoutError:  # of a signal's handler: nothing here has a deadline
                    raise
                except OSError as error:
                    if is_last or not isinstance(error, ConnectionError):
                        raise HostError(f"the network's gateway cannot be reached: {error}") from error
                    self._drop()  # it was killed

    def _running(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._note)
        return self._process

    def refusals(self, name: str) -> Refusals:
        """What was refused to a sandbox so far."""
        process = self._process
        if process is not None and name in self._refused:
            process.catch_up(name)
        refused = self._refused.get(name) or _Refused()
        return Refusals(refused.count, tuple(refused.last))

    def forget(self, name: str) -> None:
        """A sandbox has ended."""
        self._refused.pop(name, None)

    def close(self) -> None:
        """End it, and with it every proxy."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _note(self, name: str, message: dict[str, Any]) -> None:
        """Keep and log a refusal."""
        why, count = str(message["why"]), int(message["count"])
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


class _Process:
    """One gateway process and the thread that hears what it says.

    Args:
        note: is told of each refusal, and of which sandbox it is.
    """

    def __init__(self, note: Callable[[str, dict[str, Any]], None]) -> None:
        self._note = note
        hold_streams()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = companion.start(_BOOTSTRAP, theirs)
        except BaseException:  # a Ctrl-C too
            self._connection.close()
            raise
        self._numbers = itertools.count(1)
        self._asked: set[int] = set()
        self._over = self._closing = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="minisandbox-gateway", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def send(self, message: dict[str, object], *descriptors: int) -> None:
        """Send a message.

        Raises:
            OSError: it has ended.
        """
        rights.send(self._connection, json.dumps(message).encode(), descriptors)

    def catch_up(self, name: str) -> None:
        """Wait until what was refused so far was noted; where it has ended, nothing more comes."""
        number = next(self._numbers)
        self._asked.add(number)
        with contextlib.suppress(OSError):
            self.send({"verb": "tell", "id": name, "number": number})
            with self._news:
                self._news.wait_for(lambda: number not in self._asked or self._over, _LONGEST_TELLING)
        self._asked.discard(number)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._connection.recv(1 << 16):
                name, _, message = data.partition(b"\n")
                with contextlib.suppress(*wire.NONSENSE):  # one proxy's is not the others' end
                    self._take(name.decode(), json.loads(message))
        if not self._closing:
            _LOG.warning("the network's gateway was killed: what it served has no network any more")
        with self._news:
            self._over = True
            self._news.notify_all()

    def _take(self, name: str, message: dict[str, Any]) -> None:
        """Take what a sandbox's proxy has refused, or, without a name, what the gateway itself has to say."""
        if name:
            self._note(name, message)
        elif message["event"] == "told":
            with self._news:
                self._asked.discard(message["number"])
                self._news.notify_all()
        else:
            _LOG.warning(_EVENTS[message["event"]], message["id"])

    def close(self) -> None:
        """End it."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # the thread's call returns, which close(2) alone does not do
        self._thread.join(_PATIENCE)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            companion.end(self._process)
