"""The gateway at work, without a sandbox: doors that are ordinary sockets, and a process for each life."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
from tests.waiting import PATIENCE, running, stat_fields, until

from minisandbox.errors import HostError
from minisandbox.sandbox import companion, network
from minisandbox.types import Network

REFUSED = b"CONNECT elsewhere:443 HTTP/1.1\r\n\r\n"


class Life:
    """What a gateway knows of a sandbox."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.door = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self.door.getsockname()

    def ask(self, request: bytes = REFUSED) -> bytes:
        with socket.create_connection(self.address, PATIENCE) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(65536), b""))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.door.close()


class Gateway:
    """A gateway and its controller, which listens when it is asked to."""

    def __init__(self, prepare: str = "") -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = companion.start(
                network._BOOTSTRAP.replace("gateway.main(", prepare + "gateway.main("), theirs
            )
        self.connection.settimeout(PATIENCE)
        self.said: list[tuple[str, dict[str, object]]] = []
        self.refused: Counter[str] = Counter()

    def serve(self, life: Life, unused: float = 60.0) -> None:
        pidfd = os.pidfd_open(life.process.pid)
        message = {
            "verb": "serve", "id": life.name, "hosts": ["h"], "private": False, "unused": unused,
            "upstream": [None, None, []],
        }  # fmt: skip
        socket.send_fds(self.connection, [json.dumps(message).encode()], [life.door.fileno(), pidfd])
        os.close(pidfd)

    def ask(self, name: str, number: int) -> None:
        self.connection.send(json.dumps({"verb": "tell", "id": name, "number": number}).encode())

    def hear(self) -> tuple[str, dict[str, object]]:
        """Take the next that it says."""
        name, _, text = self.connection.recv(1 << 16).decode().partition("\n")
        message = json.loads(text)
        self.refused[name] += message.get("count", 0)
        self.said.append((name, message))
        return name, message

    def takes(self, life: Life) -> bool:
        """Whether it has room for another."""
        self.serve(life)
        self.ask(life.name, 1000)
        self.said.clear()
        self.hear_until(1000)
        return ("", {"event": "full", "id": life.name}) not in self.said

    def hear_until(self, number: int) -> None:
        """Take what it says up to its answer to a question."""
        while self.hear() != ("", {"event": "told", "number": number}):
            pass

    def proxies(self) -> list[int]:
        """Pids of its proxies."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            fields = stat_fields(pid)
            if fields is not None and fields[1] == str(self.process.pid) and running(pid):
                found.append(pid)
        return found

    def unread(self) -> bool:
        """Whether there is something that it was sent and has not taken."""
        return int.from_bytes(fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder) > 0

    def sleeps(self) -> bool:
        fields = stat_fields(self.process.pid)
        return fields is not None and fields[0] == "S"

    def processor_time(self) -> float:
        fields = stat_fields(self.process.pid)
        assert fields is not None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.connection.close()
        assert self.process.wait(PATIENCE) == 0


@contextlib.contextmanager
def gateway(prepare: str = "") -> Iterator[Gateway]:
    made = Gateway(prepare)
    try:
        yield made
    finally:
        doomed = made.proxies()
        made.end()
        until(lambda: not any(map(running, doomed)))


@contextlib.contextmanager
def lives(*names: str) -> Iterator[list[Life]]:
    made = [Life(name) for name in names]
    try:
        yield made
    finally:
        for life in made:
            life.end()


def test_refusals_wait_for_a_controller_that_does_not_listen() -> None:
    with gateway() as made, lives("a", "b", "c", "d", "e", "f") as served, ThreadPoolExecutor() as threads:
        for life in served:
            made.serve(life)
        answers = list(threads.map(lambda life: [life.ask() for _ in range(120)], served))
        assert all(answer.startswith(b"HTTP/1.1 403 ") for some in answers for answer in some)
        used, begun = made.processor_time(), time.monotonic()
        time.sleep(0.5)
        assert made.processor_time() - used < (time.monotonic() - begun) / 2, "it waits for nothing"
        for number, life in enumerate(served):
            made.ask(life.name, number)
        told = set(range(6))
        while told:
            name, message = made.hear()
            if not name:
                assert message["event"] == "told"
                told.discard(int(str(message["number"])))
        assert made.refused == Counter({life.name: 120 for life in served})


def test_a_question_is_answered_when_all_was_told() -> None:
    with gateway() as made, lives("a", "a") as (first, second):
        made.serve(first)
        made.ask("a", 1)
        made.hear_until(1)
        for _ in range(3):
            first.ask()
        first.end()
        made.serve(second)
        second.ask()
        made.ask("a", 2)
        made.hear_until(2)
        assert made.refused["a"] == 4


def test_what_a_proxy_said_is_told_though_it_ended_with_a_question_unread() -> None:
    """The kernel says so once (ECONNRESET) before it gives what the other end has sent (net/unix/af_unix.c)."""
    with gateway() as made, lives("a", "b", "c", "d", "e", "f") as served:
        before: list[int] = []
        for life in served:  # more than the controller has room for, so that the rest waits with the gateway
            before = made.proxies()
            made.serve(life)
            for _ in range(90):
                life.ask()
        (pid,) = set(made.proxies()) - set(before)
        os.kill(pid, signal.SIGSTOP)
        made.ask("f", 1)
        until(lambda: not made.unread() and made.sleeps())
        os.kill(pid, signal.SIGKILL)
        made.hear_until(1)
        assert made.refused["f"] == 90


def test_a_proxy_that_was_killed_is_told_and_followed_by_another() -> None:
    with gateway() as made, lives("a", "b") as (a, b):
        made.serve(a)
        a.ask()
        (pid,) = made.proxies()
        made.serve(b)
        b.ask()
        os.kill(pid, signal.SIGKILL)
        assert a.ask().startswith(b"HTTP/1.1 403 ")
        assert len(made.proxies()) == 2
        made.ask("a", 1)
        made.hear_until(1)
        assert ("", {"event": "killed", "id": "a"}) in made.said
        assert made.refused["a"] == 2


@pytest.mark.parametrize("number", ["EAGAIN", "ENOMEM", "EMFILE"])
def test_a_proxy_that_cannot_be_made_is_tried_again(number: str) -> None:
    refusing = "socket.socketpair" if number == "EMFILE" else "os.fork"
    prepare = (
        f"import errno, itertools; real, count = {refusing}, itertools.count()\n"
        "def refuse(*given):\n"
        f"    if next(count) < 3: raise OSError(errno.{number}, 'no')\n"
        "    return real(*given)\n"
        f"{refusing} = refuse\n"
    )
    with gateway("\n" + prepare) as made, lives("a") as (life,):
        made.serve(life)
        used, begun = made.processor_time(), time.monotonic()
        assert life.ask().startswith(b"HTTP/1.1 403 ")
        assert time.monotonic() - begun > 1
        assert made.processor_time() - used < 0.7, "it does not wait between"


def test_a_gateway_has_a_descriptor_for_the_proxy_of_each_sandbox_that_it_takes() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (22, 22)); "  # 16 of its own, three for each
    with gateway(limit) as made, lives("a", "b", "c") as served:
        for life in served:
            made.serve(life)
        assert made.hear() == ("", {"event": "full", "id": "c"})
        for life in served[:2]:
            assert life.ask().startswith(b"HTTP/1.1 403 ")
        served[0].end()
        made.ask("a", 1)
        made.hear_until(1)
        until(lambda: made.takes(served[2]))
        assert served[2].ask().startswith(b"HTTP/1.1 403 ")


def test_a_door_that_does_not_listen_any_more_is_left_alone() -> None:
    with gateway() as made, lives("a", "b") as (a, b):
        made.serve(a)
        a.door.shutdown(socket.SHUT_RDWR)
        made.serve(b)
        assert b.ask().startswith(b"HTTP/1.1 403 ")
        used = made.processor_time()
        time.sleep(0.5)
        assert made.processor_time() - used < 0.2
        assert len(made.proxies()) == 1


def test_a_proxy_that_does_not_end_with_its_sandbox_is_ended() -> None:
    with gateway("gateway._GRACE = 0.2; ") as made, lives("a") as (life,):
        made.serve(life)
        life.ask()
        (pid,) = made.proxies()
        os.kill(pid, signal.SIGSTOP)
        life.end()
        made.ask("a", 1)
        made.hear_until(1)  # the answer needs the end of it
        assert not running(pid)


def test_it_ends_with_its_controller_and_leaves_nobody() -> None:
    made = Gateway()
    with lives("a") as (life,):
        made.serve(life)
        life.ask()
        (pid,) = made.proxies()
        made.end()
        assert not running(pid)
        assert stat_fields(pid) is None, "it was reaped, too"


# --- the controller's side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.EMSGSIZE])
def test_what_cannot_be_sent_costs_no_other_sandbox_its_gateway(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A user's sandbox can leave so many descriptors under way that no more may be sent, for example."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    made = network.Gateway()
    with contextlib.closing(made), lives("a", "b") as (a, b):
        given = [(life.name, Network.allow("h"), life.door.dup(), os.pidfd_open(life.process.pid)) for life in (a, b)]
        try:
            made.serve(*given[0])
            assert made._process is not None
            pid = made._process.pid
            monkeypatch.setattr("minisandbox.sandbox.rights.send", refuse)
            with pytest.raises(HostError, match=f"cannot be reached: .*{os.strerror(number)}"):
                made.serve(*given[1])
            monkeypatch.undo()
            assert running(pid)
            assert a.ask().startswith(b"HTTP/1.1 403 ")
            assert made.refusals("a").count == 1
            assert made._process.pid == pid
        finally:
            for *_, pidfd in given:
                os.close(pidfd)


NONSENSE = """
import os, socket, sys
os.read(0, 65536)
connection = socket.socket(fileno=int(sys.argv[1]))
for message in (b"x", b"[" * 30000, b"[]", b"{}", b'{"why": "", "count": 1e999}', b'{"why": "", "count": []}'):
    connection.send(b"a\\n" + message)
connection.send(b'b\\n{"why": "no", "count": 1}')
connection.recv(1)
"""


def test_what_one_proxy_says_does_not_keep_others_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_BOOTSTRAP", NONSENSE)
    made = network.Gateway()
    made._refused = {name: network._Refused() for name in "ab"}
    with contextlib.closing(made):
        made._running()
        until(lambda: made._refused["b"].count)
        assert made._refused["a"].count == 0
