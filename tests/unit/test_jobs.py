"""How a job starts: its socket before its request, its pipes before its command; and when pid 1 forks a worker."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from minisandbox.errors import InvalidValue, SandboxGone
from minisandbox.launch import init
from minisandbox.launch.jobs import frames, worker
from minisandbox.launch.jobs import spawn as spawning
from minisandbox.launch.jobs.exec import Leader, OutputPipes
from minisandbox.launch.kernel.cgroups import LimitCounters
from minisandbox.sandbox import io_async, io_sync
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.protocol.wire import ExecCall, Operation
from minisandbox.types import ExecResult

PRIMARY, ANOTHER = 7, 8


class Core:
    """A sandbox whose worker answers every request with success, on a thread."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.events: list[str] = []
        self.hung_up = threading.Event()

    def open_job(self, *, wait: bool = True) -> socket.socket:
        self.events.append("job")
        if self.gone:
            raise SandboxGone("it has ended")
        ours, peer = socket.socketpair()
        threading.Thread(target=self._answer, args=(peer,)).start()
        return ours

    def _answer(self, peer: socket.socket) -> None:
        leader = Leader(0)
        leader.status = 0
        with peer:
            if peer.recv(1 << 16):
                peer.sendall(frames.encode(leader.exit_header(0)))
            else:
                self.hung_up.set()

    def run(self, *, valid: bool = True) -> Operation[ExecResult]:
        """An operation that records when it builds its request."""
        self.events.append("request")
        if not valid:
            raise InvalidValue("an argument")
        call = ExecCall(["true"], env={}, cwd="/", timeout=None, stdin=None, output=10)
        yield call
        return call.result()


def sync_driver(core: Core, operation: Operation[ExecResult], *, early: bool) -> ExecResult:
    return io_sync.carry_out(cast("SandboxCore", core), operation, early=early)


def async_driver(core: Core, operation: Operation[ExecResult], *, early: bool) -> ExecResult:
    return asyncio.run(io_async.carry_out(cast("SandboxCore", core), operation, early=early))


Driver = Callable[..., ExecResult]
drivers = pytest.mark.parametrize("driver", [sync_driver, async_driver])


@drivers
@pytest.mark.parametrize(("early", "events"), [(True, ["job", "request"]), (False, ["request", "job"])])
def test_an_early_job_is_opened_before_the_request_is_built(driver: Driver, early: bool, events: list[str]) -> None:
    core = Core()
    assert driver(core, core.run(), early=early).ok
    assert core.events == events


@drivers
def test_an_invalid_argument_closes_the_early_job(driver: Driver) -> None:
    core = Core()
    with pytest.raises(InvalidValue):
        driver(core, core.run(valid=False), early=True)
    assert core.hung_up.wait(10)


@drivers
def test_an_invalid_argument_is_reported_before_an_ended_sandbox(driver: Driver) -> None:
    core = Core(gone=True)
    with pytest.raises(InvalidValue):
        driver(core, core.run(valid=False), early=True)
    with pytest.raises(SandboxGone):
        driver(core, core.run(), early=True)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_prepared_pipes_are_handed_over_once() -> None:
    before, output_pipes = open_descriptors(), OutputPipes()
    output_pipes.prepare()
    output_pipes.prepare()
    assert open_descriptors() == before + 4
    with spawning.Pipes() as pipes:
        ends = [output_pipes.take(pipes) for _ in range(3)]
        for read_end, write_end in ends:
            os.write(write_end, b"x")
            assert os.read(read_end, 2) == b"x"
        assert len({descriptor for pair in ends for descriptor in pair}) == 6
    assert open_descriptors() == before


def test_unused_pipes_are_closed() -> None:
    before, output_pipes = open_descriptors(), OutputPipes()
    output_pipes.prepare()
    output_pipes.close()
    assert open_descriptors() == before


def test_no_pipes_are_prepared_without_free_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    output_pipes = OutputPipes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", refuse)
        output_pipes.prepare()
    with spawning.Pipes() as pipes:
        assert len(output_pipes.take(pipes)) == 2


@pytest.fixture
def loop() -> Iterator[init.Init]:
    """Pid 1 with a busy worker, without the signal handling of a real one."""
    loop = init.Init.__new__(init.Init)
    loop._notes, loop._notes_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    loop._workers, loop._primary_pid = {PRIMARY}, PRIMARY
    yield loop
    os.close(loop._notes)
    os.close(loop._notes_write)


def test_pid_1_waits_for_a_worker_that_is_about_to_be_idle(loop: init.Init, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not loop._is_idle_soon()
    monkeypatch.setattr(init, "_MOMENT", 10_000)
    report = threading.Timer(0.05, worker._note, (loop._notes_write, worker.IDLE))
    report.start()
    assert loop._is_idle_soon()
    report.join()


@pytest.mark.parametrize(("workers", "primary"), [({PRIMARY, ANOTHER}, PRIMARY), ({ANOTHER}, 0), (set(), 0)])
def test_pid_1_forks_at_once_for_several_commands(
    loop: init.Init, monkeypatch: pytest.MonkeyPatch, workers: set[int], primary: int
) -> None:
    monkeypatch.setattr(init, "_MOMENT", 60_000)
    loop._workers, loop._primary_pid = workers, primary
    assert not loop._is_idle_soon()


def test_only_a_changed_counter_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = LimitCounters(None)
    counters.mark()
    monkeypatch.setattr("minisandbox.launch.kernel.cgroups._counts", None)
    assert "memory" not in counters.hits()
