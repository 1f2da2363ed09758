"""The gateway of one controller: it forks a proxy process for each sandbox with an allow-list.

The gateway holds the listening socket inside each sandbox. When a program connects, the gateway forks a proxy
(:mod:`.proxy`), which accepts connections of this sandbox alone. When the proxy has exited, the gateway watches the
socket again. The gateway is single-threaded without asyncio, so that it can fork, and reads no data from a sandbox.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.identity import leave_root

from . import proxy, rules

_MOST_MESSAGE = 1 << 18
_DESCRIPTORS = 4
"""Descriptors received per sandbox: its listener, its pidfd, and the two of :class:`.proxy.Reports`."""
_OWN, _EACH = 16, _DESCRIPTORS + 1
"""Number of descriptors that the gateway needs for itself, and per sandbox (with the pidfd of its proxy)."""
_RETRY = 0.5
"""Seconds until a failed fork is retried, and until a killed proxy is replaced."""
KILLED = "its network proxy was killed: open connections are cut off, the next one starts another"

_Callback = Callable[[int], None]


def main(connection: socket.socket, controller: int) -> NoReturn:
    """Serve one controller until it ends.

    Args:
        connection: datagram socket to the controller.
        controller: pidfd of the controller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # waitpid(2) would fail if SIGCHLD were ignored
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    sc.overwrite_arguments("minisandbox-gateway")
    # proxies parse data from sandboxes: drop all privileges, so that an exploit gains nothing
    leave_root()
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    sc.capset(0)
    gc.collect()
    gc.freeze()  # a garbage collection would copy every page that it touches in each child
    sc.trim_memory()
    _Gateway(connection, controller, maximum).serve()


@dataclass(slots=True, eq=False)
class _Sandbox:
    """One run of a sandbox, until its pid 1 exits.

    Attributes:
        terms: configuration of its proxy.
        listener: listening socket inside the sandbox; -1 once the sandbox has ended.
        init_pidfd: pidfd of its pid 1.
        reports: receives its proxy's reports of refusals.
        pid: pid of its proxy; 0 if none is running.
    """

    terms: proxy.ProxyTerms
    listener: int
    init_pidfd: int
    reports: proxy.Reports
    pid: int = 0


class _Gateway:
    def __init__(self, connection: socket.socket, controller: int, most_files: int) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._callbacks: dict[int, _Callback] = {}
        self._paused: deque[tuple[float, _Sandbox]] = deque()
        self._proxies: set[int] = set()
        self._capacity: float = float("inf") if most_files == resource.RLIM_INFINITY else (most_files - _OWN) // _EACH
        connection.setblocking(False)
        self._watch(controller, lambda _: self._close())
        self._watch(connection.fileno(), lambda _: self._receive())

    # --- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> NoReturn:
        """Handle events until the controller exits."""
        while True:
            ready = [
                (descriptor, events, self._callbacks[descriptor])
                for descriptor, events in self._poll.poll(self._timeout())
            ]
            for descriptor, events, callback in ready:
                # an earlier callback may have closed the descriptor, and its number may be in use again
                if self._callbacks.get(descriptor) is callback:
                    callback(events)
            while self._paused and self._paused[0][0] <= time.monotonic():
                self._watch_listener(self._paused.popleft()[1])

    def _timeout(self) -> float | None:
        """Return the milliseconds until the next listener must be watched again, or None."""
        return max(0.0, self._paused[0][0] - time.monotonic()) * 1000 + 1 if self._paused else None

    def _close(self) -> NoReturn:
        for pid in self._proxies:
            os.kill(pid, signal.SIGKILL)
        for pid in self._proxies:
            os.waitpid(pid, 0)  # in a container, pid 1 may never reap orphans
        os._exit(0)

    def _watch(self, descriptor: int, callback: _Callback) -> None:
        self._callbacks[descriptor] = callback
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._callbacks.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    # --- sandboxes ---------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Receive the registration of a sandbox from the controller."""
        size = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._connection.recvmsg(_MOST_MESSAGE, size, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._close()
        message = json.loads(data)
        descriptors = array.array("i")
        for _, _, packed in ancillary:
            descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
        if len(descriptors) == _DESCRIPTORS and self._capacity > 0:
            self._register(message, *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            self._connection.send(message["id"].encode())

    def _register(self, message: dict[str, Any], listener: int, init_pidfd: int, reports: int, counter: int) -> None:
        """Serve a sandbox until its pid 1 exits."""
        allow_rules = rules.Rules(tuple(message["hosts"]), bool(message["private"]))
        server = rules.parse_authority(message["hosts"][0]) if message["server"] else None
        terms = proxy.ProxyTerms(allow_rules, rules.Upstream(*message["upstream"]), float(message["unused"]), server)
        sandbox = _Sandbox(terms, listener, init_pidfd, proxy.Reports(socket.socket(fileno=reports), counter))
        self._capacity -= 1
        self._watch(init_pidfd, lambda _: self._release(sandbox))
        self._watch_listener(sandbox)

    def _watch_listener(self, sandbox: _Sandbox) -> None:
        if sandbox.listener >= 0:
            self._watch(sandbox.listener, lambda events: self._start_proxy(sandbox, events))

    def _watch_listener_later(self, sandbox: _Sandbox) -> None:
        self._paused.append((time.monotonic() + _RETRY, sandbox))

    def _release(self, sandbox: _Sandbox) -> None:
        """Close the descriptors of a sandbox that has ended; its listening socket keeps the network namespace alive."""
        for descriptor in (sandbox.init_pidfd, sandbox.listener):
            self._unwatch(descriptor)
            os.close(descriptor)
        sandbox.init_pidfd = sandbox.listener = -1
        sandbox.reports.close()
        self._capacity += 1
        if sandbox.pid:
            os.kill(sandbox.pid, signal.SIGKILL)

    # --- proxies -----------------------------------------------------------------------------------------------------

    def _start_proxy(self, sandbox: _Sandbox, events: int) -> None:
        """Fork a proxy, which accepts the pending connection."""
        self._unwatch(sandbox.listener)
        if events & ~select.POLLIN:  # the socket was shut down; poll(2) would report that forever
            return
        try:
            sandbox.pid, pidfd = self._fork(sandbox)
        except OSError:  # out of processes, memory or descriptors
            self._watch_listener_later(sandbox)
            return
        self._proxies.add(sandbox.pid)
        self._watch(pidfd, lambda _: self._reap(sandbox, pidfd))

    def _fork(self, sandbox: _Sandbox) -> tuple[int, int]:
        """Fork a proxy; return its pid and its pidfd.

        The proxy waits until the gateway has the pidfd: one that is killed before has accepted no connection.
        """
        gateway = os.getpid()
        start, hold = os.pipe()
        with sc.closing(start), sc.closing(hold):
            pid = os.fork()
            if not pid:
                try:
                    os.close(hold)
                    os.read(start, 1)  # until the gateway closes its end
                    os.close(start)
                    proxy.main(sandbox.terms, sandbox.listener, sandbox.reports, gateway)
                finally:
                    os._exit(1)
            try:
                return pid, os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise

    def _reap(self, sandbox: _Sandbox, pidfd: int) -> None:
        """Reap a proxy that has exited, and watch its sandbox's listener again."""
        self._unwatch(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(sandbox.pid, 0)
        self._proxies.discard(sandbox.pid)
        sandbox.pid = 0
        if status == 0:
            self._watch_listener(sandbox)
        elif sandbox.listener >= 0:
            sandbox.reports.send(KILLED)
            self._watch_listener_later(sandbox)
