"""The gateway at work, without a sandbox: ordinary sockets that listen, and a process for each life."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
from tests.waiting import PATIENCE, running, stat_fields, until

from minisandbox.egress.gateway import KILLED
from minisandbox.errors import HostError
from minisandbox.sandbox import helper_process, network
from minisandbox.types import Network

REFUSED = b"CONNECT elsewhere:443 HTTP/1.1\r\n\r\n"


class Life:
    """What a gateway knows of a sandbox."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self.listener.getsockname()
        self.refusals = network._Refusals(name)

    def ask(self, request: bytes = REFUSED) -> bytes:
        with socket.create_connection(self.address, PATIENCE) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(65536), b""))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()
        self.refusals.close()


class Gateway:
    """A gateway and its controller, which listens when it is asked to."""

    def __init__(self, prepare: str = "") -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = helper_process.bootstrap("egress.gateway").replace("main(socket", prepare + "main(socket")
            self.process = helper_process.start(code, theirs)
        self.connection.settimeout(PATIENCE)

    def serve(self, life: Life, unused: float = 60.0) -> None:
        pidfd = os.pidfd_open(life.process.pid)
        message = {
            "id": life.name,
            "hosts": ["h"],
            "private": False,
            "server": False,
            "unused": unused,
            "upstream": ["", "", ""],
        }
        given = [life.listener.fileno(), pidfd, life.refusals.reporters.fileno(), life.refusals.counter]
        socket.send_fds(self.connection, [json.dumps(message).encode()], given)
        os.close(pidfd)

    def proxies(self) -> list[int]:
        """Pids of its proxies."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            fields = stat_fields(pid)
            if fields is not None and fields[1] == str(self.process.pid) and running(pid):
                found.append(pid)
        return found

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


def test_refusals_are_counted_whether_or_not_a_controller_listens() -> None:
    with gateway() as made, lives("a", "b", "c") as served, ThreadPoolExecutor() as threads:
        for life in served:
            made.serve(life)
        answers = list(threads.map(lambda life: [life.ask() for _ in range(150)], served))
        assert all(answer.startswith(b"HTTP/1.1 403 ") for some in answers for answer in some)
        for life in served:
            refusals = life.refusals.collect()
            assert refusals.count == 150
            assert refusals.last[0] == "elsewhere:443 is not on this sandbox's allow-list"


def test_the_lives_of_a_sandbox_are_counted_together() -> None:
    with gateway() as made, lives("a", "a") as (first, second):
        second.refusals.close()
        second.refusals = first.refusals
        made.serve(first)
        for _ in range(3):
            first.ask()
        first.process.kill()
        made.serve(second)
        second.ask()
        assert first.refusals.collect().count == 4


def test_a_proxy_that_was_killed_is_told_and_followed_by_another(caplog: pytest.LogCaptureFixture) -> None:
    with gateway() as made, lives("a", "b") as (a, b):
        made.serve(a)
        a.ask()
        (pid,) = made.proxies()
        made.serve(b)
        b.ask()
        os.kill(pid, signal.SIGKILL)
        assert a.ask().startswith(b"HTTP/1.1 403 ")
        assert len(made.proxies()) == 2
        assert a.refusals.collect().count == 2
        assert f"sandbox a: {KILLED}" in caplog.messages


@pytest.mark.parametrize("number", ["EAGAIN", "ENOMEM", "EMFILE"])
def test_a_proxy_that_cannot_be_made_is_tried_again(number: str) -> None:
    refusing = "os.pidfd_open" if number == "EMFILE" else "os.fork"
    prepare = (
        f"import errno, itertools; real, count = {refusing}, itertools.count()\n"
        "def refuse(*given):\n"
        f"    if next(count) < 3: raise OSError(errno.{number}, 'no')\n"
        "    return real(*given)\n"
        f"{refusing} = refuse\n"
    )
    with gateway("\n" + prepare) as made, lives("a") as (life,):
        used = made.processor_time()
        made.serve(life)
        assert life.ask().startswith(b"HTTP/1.1 403 ")
        assert made.processor_time() - used < 0.7, "it does not wait between"


def test_a_gateway_has_a_descriptor_for_the_proxy_of_each_sandbox_that_it_takes() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (26, 26)); "  # 16 of its own, five for each
    with gateway(limit) as made, lives("a", "b", "c", "d") as served:
        for life in served[:3]:
            made.serve(life)
        assert made.connection.recv(100) == b"c"
        for life in served[:2]:
            assert life.ask().startswith(b"HTTP/1.1 403 ")
        doomed = made.proxies()
        served[0].end()
        until(lambda: not all(map(running, doomed)))
        made.serve(served[3])
        assert served[3].ask().startswith(b"HTTP/1.1 403 ")


def test_a_socket_that_does_not_listen_any_more_is_left_alone() -> None:
    with gateway() as made, lives("a", "b") as (a, b):
        made.serve(a)
        a.listener.shutdown(socket.SHUT_RDWR)
        made.serve(b)
        assert b.ask().startswith(b"HTTP/1.1 403 ")
        used = made.processor_time()
        time.sleep(0.5)
        assert made.processor_time() - used < 0.2
        assert len(made.proxies()) == 1


def test_a_proxy_that_does_not_end_with_its_sandbox_is_ended() -> None:
    with gateway() as made, lives("a") as (life,):
        made.serve(life)
        life.ask()
        (pid,) = made.proxies()
        os.kill(pid, signal.SIGSTOP)
        life.end()
        until(lambda: not running(pid))


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
        given = [
            (life.name, Network.allow("h"), life.listener.dup(), os.pidfd_open(life.process.pid)) for life in (a, b)
        ]
        try:
            made.serve(*given[0])
            assert made._process is not None
            pid = made._process.pid
            monkeypatch.setattr("minisandbox.sandbox.fd_passing.send", refuse)
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
