"""The gateway of one controller: each sandbox that was given a way out gets a proxy process of its own.

The gateway keeps the socket that listens in each sandbox, and forks a proxy (:mod:`.proxy`) when somebody connects. It
accepts, and serves this sandbox alone; while it lives the gateway does not look at the socket. A proxy that nobody
has used for a while ends, and one that was killed takes along what it served: then the gateway looks again.

It has one thread and no event loop, so that it can fork, and reads nothing that a sandbox sends. What a proxy tells is
handed on as it came, behind the name of its sandbox: none can speak for another, or take its descriptors.
"""

from __future__ import annotations

import array
import contextlib
import gc
import heapq
import itertools
import json
import os
import resource
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.identity import leave_root

from . import proxy, rules

_MOST_MESSAGE = 1 << 18
_OWN, _EACH = 16, 3
"""Descriptors: of its own, and for each sandbox, whose proxy is not there yet."""
_REST = 0.5
"""Seconds after which a fork that failed is tried again, and a proxy that was killed gets a successor."""
_GRACE = 5.0
"""Seconds that a proxy has to end after its sandbox."""

_Reaction = Callable[[int], None]


def main(connection: socket.socket, controller: int) -> NoReturn:
    """Serve one controller until it ends.

    Args:
        connection: datagram socket to the controller.
        controller: pidfd of the controller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever ignores it has nobody to wait for (wait(2))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sc.overwrite_arguments("minisandbox-gateway")
    # proxies read what sandboxes send: whatever goes wrong there should be worth nothing
    leave_root()
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    sc.capset(0)
    gc.collect()
    gc.freeze()  # a collection would copy every page it touches in each child
    sc.trim_memory()
    _Gateway(connection, controller, most).serve()


@dataclass(slots=True, eq=False)
class _Tenant:
    """One life of a sandbox.

    Attributes:
        name: its id.
        terms: what its proxy is to do.
        listener: listens inside; -1 when the sandbox has ended.
        sandbox: pidfd of its first process.
        child: its proxy, while it has one.
    """

    name: str
    terms: proxy.Terms
    listener: int
    sandbox: int
    child: _Child | None = None


@dataclass(slots=True, eq=False)
class _Child:
    """One proxy process.

    Attributes:
        tenant: whom it serves.
        pid: its pid; nobody else reaps it.
        connection: datagram socket to it; its end is the proxy's.
        asked: questions that it has not answered yet.
    """

    tenant: _Tenant
    pid: int
    connection: socket.socket
    asked: deque[_Question] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Question:
    """The controller's question whether everything was told: how many proxies have not answered it."""

    number: int
    left: int = 0


class _Gateway:
    def __init__(self, connection: socket.socket, controller: int, most_files: int) -> None:
        self._connection = connection
        self._controller = controller
        self._poll = select.poll()
        self._reactions: dict[int, _Reaction] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._room: float = float("inf") if most_files == resource.RLIM_INFINITY else (most_files - _OWN) // _EACH
        self._children: dict[int, _Child] = {}
        self._unsent: deque[bytes] = deque()
        self._silent: list[_Child] = []
        connection.setblocking(False)
        self._watch(controller, lambda _: self._close())
        self._watch(connection.fileno(), self._hear)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> NoReturn:
        """Do what there is to do, for ever."""
        while True:
            ready = [(number, events, self._reactions[number]) for number, events in self._poll.poll(self._patience())]
            for number, events, reaction in ready:
                if self._reactions.get(number) is reaction:  # the number may be that of something new by now
                    reaction(events)
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()

    def _patience(self) -> float | None:
        """Milliseconds until something is due."""
        return max(0.0, self._later[0][0] - time.monotonic()) * 1000 + 1 if self._later else None

    def _close(self) -> NoReturn:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)  # not every first process would reap them
        os._exit(0)

    def _watch(self, descriptor: int, reaction: _Reaction) -> None:
        self._reactions[descriptor] = reaction
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._reactions.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _do_later(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), work))

    # --- the controller ----------------------------------------------------------------------------------------------

    def _hear(self, events: int) -> None:
        """Hear the controller, and go on telling it what it had no room for."""
        if events & select.POLLOUT:
            self._send()
        if events & ~select.POLLOUT:
            self._take_message()

    def _take_message(self) -> None:
        """Take one message: a sandbox to serve, or a question."""
        size = socket.CMSG_SPACE(8)
        try:
            data, ancillary, _, _ = self._connection.recvmsg(_MOST_MESSAGE, size, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._close()
        message = json.loads(data)
        if message["verb"] == "tell":
            self._ask(message["id"], message["number"])
            return
        given = array.array("i", ancillary[0][2]) if ancillary else ()
        if len(given) == 2 and self._room > 0:
            self._admit(message, *given)
            return
        for descriptor in given:
            os.close(descriptor)
        self._say({"event": "full", "id": message["id"]})

    def _say(self, message: dict[str, object]) -> None:
        """Tell the controller something of our own, which has no name before it."""
        self._tell("", json.dumps(message).encode())

    def _tell(self, name: str, message: bytes) -> None:
        self._unsent.append(name.encode() + b"\n" + message)
        self._send()

    def _send(self) -> None:
        """Send the controller what it has room for; proxies are heard again when it knows all that they have said."""
        while self._unsent:
            with contextlib.suppress(OSError):
                try:
                    self._connection.send(self._unsent[0])
                except BlockingIOError:
                    self._poll.modify(self._connection, select.POLLIN | select.POLLOUT)
                    return
            self._unsent.popleft()
        self._poll.modify(self._connection, select.POLLIN)
        silent, self._silent = self._silent, []
        for child in silent:
            self._watch_child(child)

    def _ask(self, name: str, number: int) -> None:
        """Answer a question when every proxy of a sandbox has told everything: those of its lives before, too."""
        question = _Question(number)
        for child in [child for child in self._children.values() if child.tenant.name == name]:
            with contextlib.suppress(OSError):  # it has no room for a question, or has ended
                child.connection.send(proxy.TELL)
                child.asked.append(question)
                question.left += 1
        self._answer(question)

    def _answer(self, question: _Question) -> None:
        if not question.left:
            self._say({"event": "told", "number": question.number})

    # --- sandboxes ---------------------------------------------------------------------------------------------------

    def _admit(self, message: dict[str, Any], listener: int, sandbox: int) -> None:
        """Serve a sandbox until its first process, known by a pidfd, has ended."""
        allowed = rules.Rules(tuple(message["hosts"]), bool(message["private"]))
        terms = proxy.Terms(allowed, rules.Upstream(*message["upstream"]), float(message["unused"]))
        tenant = _Tenant(message["id"], terms, listener, sandbox)
        self._room -= 1
        self._watch(sandbox, lambda _: self._dismiss(tenant))
        self._watch_listener(tenant)

    def _watch_listener(self, tenant: _Tenant) -> None:
        if tenant.listener >= 0:
            self._watch(tenant.listener, lambda events: self._begin(tenant, events))

    def _dismiss(self, tenant: _Tenant) -> None:
        """Forget a sandbox that has ended: a listening socket keeps its network namespace alive."""
        for descriptor in (tenant.sandbox, tenant.listener):
            self._unwatch(descriptor)
            os.close(descriptor)
        tenant.sandbox = tenant.listener = -1
        self._room += 1
        if (child := tenant.child) is not None:  # it knows, too
            self._do_later(_GRACE, lambda: self._end(child))

    def _begin(self, tenant: _Tenant, events: int) -> None:
        """Have somebody accept who connects; the socket is the proxy's until that one has ended."""
        self._unwatch(tenant.listener)
        if events & ~select.POLLIN:  # it listens no more, and says so for ever
            return
        try:
            tenant.child = child = self._fork(tenant)
        except OSError:  # no process, memory or descriptor is left
            self._do_later(_REST, lambda: self._watch_listener(tenant))
            return
        self._children[child.pid] = child
        self._watch_child(child)

    def _fork(self, tenant: _Tenant) -> _Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gateway = os.getpid()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if not pid:
                try:
                    held = proxy.Descriptors(theirs.fileno(), tenant.listener, tenant.sandbox, self._controller)
                    proxy.main(tenant.terms, held, gateway)
                finally:
                    os._exit(1)
        ours.setblocking(False)
        return _Child(tenant, pid, ours)

    # --- their proxies -----------------------------------------------------------------------------------------------

    def _watch_child(self, child: _Child) -> None:
        self._watch(child.connection.fileno(), lambda _: self._listen(child))

    def _listen(self, child: _Child) -> None:
        """Take one message of a proxy, and no further one before the controller has had room for it."""
        try:
            data = child.connection.recv(proxy.MOST_MESSAGE)
        except (BlockingIOError, ConnectionResetError):  # it ended with a question unread; what it said is still there
            return
        except OSError:
            data = b""
        if not data:
            self._bury(child)
        elif data != proxy.TOLD:
            self._tell(child.tenant.name, data)
        elif child.asked:
            self._answered(child)
        if self._unsent and self._children.get(child.pid) is child:
            self._unwatch(child.connection.fileno())
            self._silent.append(child)

    def _answered(self, child: _Child) -> None:
        question = child.asked.popleft()
        question.left -= 1
        self._answer(question)

    def _end(self, child: _Child) -> None:
        if self._children.get(child.pid) is child:  # else it is gone, and its pid may be another's
            os.kill(child.pid, signal.SIGKILL)

    def _bury(self, child: _Child) -> None:
        """Take leave of a proxy that has closed its connection; others connect to the sandbox, perhaps."""
        self._unwatch(child.connection.fileno())
        child.connection.close()
        self._end(child)  # it is ending, if it is what we think it is
        del self._children[child.pid]
        _, status = os.waitpid(child.pid, 0)
        while child.asked:
            self._answered(child)
        tenant = child.tenant
        tenant.child = None
        if status == 0:
            self._watch_listener(tenant)
        elif tenant.listener >= 0:
            self._say({"event": "killed", "id": tenant.name})
            self._do_later(_REST, lambda: self._watch_listener(tenant))
