"""The synchronous handles among threads and interrupts."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.errors import InvalidValue
from minisandbox.sandbox import Process, Sandbox, fd_passing, live_sandboxes
from minisandbox.sandbox.protocol.connection import MOST_UNREAD
from minisandbox.types import ExecResult, ImageSpec, Outcome, Output

pytestmark = pytest.mark.kernel
T = TypeVar("T")


class Later(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.value: object = None
        self.start()

    def run(self) -> None:
        self.value = self._function()

    def result(self) -> object:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.value


def output(process: Process) -> bytes:
    return b"".join(event.data for event in process.events() if isinstance(event, Output))


def runs(box: Sandbox, command: str) -> bool:
    return command in box.exec("ps -eo args").stdout.splitlines()


def interrupt_when(condition: Callable[[], bool]) -> None:
    """Send this process what Ctrl-C sends it, once something is so."""

    def wait() -> None:
        until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_abandoned_sandbox_is_collected_in_the_midst_of_a_request(
    spec: ImageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection comes where it likes, while the launcher's lock is held too."""
    with Sandbox.create(spec) as box, box.snapshot() as snapshot:
        cycle: list[object] = [Sandbox.create(snapshot, labels={"test": "cycle"})]
        cycle.append(cycle)
    asked: list[object] = []
    send = fd_passing.send

    def collect_first(*given: Any) -> None:
        asked.append(gc.collect())
        send(*given)

    monkeypatch.setattr(fd_passing, "send", collect_first)
    del cycle
    Later(lambda: Sandbox.create(spec).stop()).result()
    assert asked
    assert live_sandboxes(labels={"test": "cycle"}) == ()


def test_an_interrupt_ends_a_command_and_nothing_else(box: Sandbox) -> None:
    interrupt_when(lambda: runs(box, "sleep 91"))
    with pytest.raises(KeyboardInterrupt):
        box.exec("sleep 90 & sleep 91")
    until(lambda: not runs(box, "sleep 90") and not runs(box, "sleep 91"))
    assert box.exec("echo on").stdout == "on\n"


def test_an_interrupt_leaves_a_shell_usable(box: Sandbox) -> None:
    with box.shell() as shell:
        shell.run("cd /tmp; A=lost")
        interrupt_when(lambda: runs(box, "sleep 92"))
        with pytest.raises(KeyboardInterrupt):
            shell.run("sleep 92")
        assert shell.run("pwd; echo ${A-none}").stdout == "/tmp\nnone\n"
        assert not runs(box, "sleep 92")


def test_an_interrupt_of_a_wait_leaves_the_process(box: Sandbox) -> None:
    with box.start("echo before; read line; echo after; exit 3") as process:
        interrupt_when(lambda: process._connection._listening)
        with pytest.raises(KeyboardInterrupt):
            process.wait()
        process.write("\n")
        result = process.wait(PATIENCE)
    assert (result.exit_code, result.stdout) == (3, "before\nafter\n")


def test_readers_share_the_pieces_and_waiters_take_none(box: Sandbox) -> None:
    with box.start("read line; for i in $(seq 2000); do echo $i; done; exit 3") as process:
        readers = [Later(lambda: output(process)) for _ in range(2)]
        waiters = [Later(process.wait) for _ in range(3)]
        until(lambda: process._connection._listening)
        process.write("\n")
        results = {waiter.result() for waiter in waiters}
        seen = [reader.result() for reader in readers]
        assert results == {process.wait()}
    printed = b"".join(b"%d\n" % number for number in range(1, 2001))
    assert sum(len(part) for part in seen if isinstance(part, bytes)) == len(printed)


def test_closing_under_a_waiter(box: Sandbox) -> None:
    process = box.start("sleep 93")
    waiter = Later(process.wait)
    until(lambda: process._connection._listening)
    process.close()
    result = waiter.result()
    assert isinstance(result, ExecResult)
    assert result.outcome is Outcome.SIGNALED
    assert not runs(box, "sleep 93")


def test_events_after_a_wait(box: Sandbox) -> None:
    with box.start("echo out; echo err >&2; exit 2") as process:
        result = process.wait(PATIENCE)
        assert (result.stdout, result.stderr) == ("out\n", "err\n")
        assert list(process.events()) == [result]
        assert process.wait() is result


def test_a_reader_that_leaves_holds_no_waiter_up(box: Sandbox) -> None:
    leave = threading.Event()

    def read_one(process: Process) -> None:
        events = process.events()
        next(events)
        leave.wait(PATIENCE)

    with box.start("head -c 100M /dev/zero") as process:
        reader = Later(lambda: read_one(process))
        until(lambda: bool(process._readers))
        waiter = Later(process.wait)
        until(lambda: len(process._channel.events) >= MOST_UNREAD)
        leave.set()
        reader.result()
        result = waiter.result()
    assert isinstance(result, ExecResult)
    assert result.ok


def test_a_reader_whose_thread_has_ended_holds_no_waiter_up(box: Sandbox) -> None:
    with box.start("head -c 100M /dev/zero") as process:
        events = process.events()
        Later(lambda: next(events)).result()
        assert Later(process.wait).result() == process.wait()


def test_a_closed_handle_says_so_even_after_the_end(box: Sandbox) -> None:
    process = box.start("exit 3")
    result = process.wait(PATIENCE)
    process.close()
    assert process.wait() is result
    for verb in (process.kill, process.close_stdin, lambda: process.write("x")):
        with pytest.raises(InvalidValue, match="closed"):
            verb()


def test_a_shell_among_threads(box: Sandbox) -> None:
    with box.shell() as shell:
        shell.run("N=0")
        threads = [Later(lambda: shell.run("N=$((N+1)); sleep 0.01")) for _ in range(20)]
        for thread in threads:
            thread.result()
        assert shell.run("echo $N", timeout=PATIENCE).stdout == "20\n"
