"""Started processes: streamed both ways, signalled, on terminals, attached to again."""

from __future__ import annotations

import array
import fcntl
import itertools
import signal
import socket
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kernel.driving import Driver
from tests.waiting import PATIENCE, running_with, settled, until

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.protocol.channels import Lifetime, ProcessChannel
from minisandbox.types import ImageSpec, Limits, Outcome, Terminal

pytestmark = pytest.mark.kernel

COUNT = itertools.count(1)


def start(
    box: Sandbox,
    command: str | list[str],
    *,
    timeout: float | None = None,
    cwd: str = "/",
    pty: Terminal | None = None,
    lifetime: Lifetime = "handle",
    door: socket.socket | None = None,
    output: int = 1 << 20,
) -> Driver:
    core = box._core
    channel = ProcessChannel(
        command, id=f"p{next(COUNT)}", env=core.environment, cwd=cwd, timeout=timeout, user=None, pty=pty,
        lifetime=lifetime, output=output,
    )  # fmt: skip
    return Driver(channel, core.open_job(), door)


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(Path(directory) / "door"))
        listening.listen(16)
        yield listening


def knock(door: socket.socket | str, output: int = 1 << 20) -> Driver:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(door if isinstance(door, str) else door.getsockname())
    return Driver(ProcessChannel.attach("p", output=output), connection)


def ps(box: Sandbox) -> str:
    return box.exec("ps -eo args", timeout=PATIENCE).stdout


def until_gone(box: Sandbox, text: str) -> None:
    until(lambda: text not in ps(box))


# --- streaming -------------------------------------------------------------------------------------------------------


def test_output_comes_as_it_is_written(box: Sandbox) -> None:
    with start(box, "echo one; read x; echo two $x; read x; echo err >&2; exit 7") as process:
        process.until_output(b"one\n")
        assert process.channel.result is None
        assert process.channel.pid > 1
        process.write(b"more\n")
        process.until_output(b"two more\n")
        process.write(b"\n")
        result = process.wait()
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 7)
    assert (result.stdout, result.stderr) == ("one\ntwo more\n", "err\n")
    assert process.channel.events[-1] is result


def test_standard_input_ends_when_it_is_closed(box: Sandbox) -> None:
    with start(box, ["cat"]) as process:
        process.write(b"a\0b")
        process.channel.close_stdin()
        process.close_stdin()
        assert process.wait().stdout_bytes == b"a\0b"
        with pytest.raises(InvalidValue):
            process.channel.write(b"more")


def test_closing_a_full_input_that_nobody_reads_gets_through(box: Sandbox) -> None:
    with start(box, "read -r go < <(sleep 0.3; echo x); wc -c") as process:
        process.write(b"x" * 65536)
        process.close_stdin()
        assert process.wait().stdout == "65536\n"


def test_much_goes_both_ways_with_bounded_memory(box: Sandbox) -> None:
    size = 30_000_000
    with start(box, ["wc", "-c"]) as process:
        for _ in range(30):
            process.write(bytes(size // 30))
            process.until(lambda: process.channel.unsent == 0)
        process.close_stdin()
        assert process.wait().stdout == f"{size}\n"
    with start(box, f"head -c {size} /dev/zero") as process:
        result = process.wait()
    assert len(process.output()) == size
    assert (len(result.stdout_bytes), result.dropped_stdout) == (len(result.stdout_bytes), size - (1 << 20))


def test_who_does_not_read_input_takes_no_more_than_the_credit(box: Sandbox) -> None:
    with start(box, ["sleep", "60"]) as process:
        process.write(bytes(5_000_000))
        assert process.channel.unsent > 3_000_000
        process.channel.signal(signal.SIGTERM)
        process.send()
        result = process.wait()
        assert process.channel.unsent == 0
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, signal.SIGTERM)


def test_input_of_a_process_that_closed_it_is_thrown_away(box: Sandbox) -> None:
    with start(box, "exec <&-; sleep 0.3; echo end") as process:
        for _ in range(5):
            process.write(bytes(1_000_000))
            process.until(lambda: process.channel.unsent == 0)
        assert process.wait().stdout == "end\n"


def test_output_that_nobody_reads_holds_the_process_and_a_kill_gets_through(box: Sandbox) -> None:
    script = "i=0; while head -c 100000 /dev/zero; do i=$((i+1)); echo $i >/tmp/count; done"
    with start(box, script) as process:
        last = ""
        while (now := box.exec("sleep 0.5; cat /tmp/count").stdout) != last:
            last = now
        assert int(last) < 100
        process.channel.kill()
        process.send()
        until_gone(box, "head -c 100000")
        result = process.wait()
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, signal.SIGKILL)


def test_signals_reach_the_process_alone(box: Sandbox) -> None:
    script = "trap 'echo got it; exit 5' USR1; sleep 61 & echo ready; while :; do sleep 0.05; done"
    with start(box, script) as process:
        process.until_output(b"ready\n")
        process.channel.signal(signal.SIGUSR1)
        process.send()
        result = process.wait()
    assert (result.stdout, result.exit_code) == ("ready\ngot it\n", 5)
    assert "sleep 61" in ps(box)
    with pytest.raises(InvalidValue):
        process.channel.signal(1000)


def test_killing_ends_the_whole_tree(box: Sandbox) -> None:
    with start(box, "setsid -f sleep 62; echo ready; sleep 63") as process:
        process.until_output(b"ready\n")
        process.channel.kill()
        process.send()
        assert process.wait().signal == signal.SIGKILL
        assert not {"sleep 62", "sleep 63"} & set(ps(box).split("\n"))


def test_hanging_up_ends_the_whole_tree(box: Sandbox) -> None:
    with start(box, "setsid -f sleep 62; echo ready; sleep 63") as process:
        process.until_output(b"ready\n")
    until_gone(box, "sleep 6")


def test_a_timeout(box: Sandbox) -> None:
    with start(box, "echo before; sleep 60", timeout=0.3) as process:
        result = process.wait()
    assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, "before\n")


def test_background_children_do_not_hold_the_result_and_live_on(box: Sandbox) -> None:
    with start(
        box, "(sleep 0.5; yes | head -c 300000; touch /tmp/survived; sleep 64) & yes | head -c 100000"
    ) as process:
        result = process.wait()
    assert (len(result.stdout_bytes), result.exit_code) == (100_000, 0)
    assert result.left_running >= 1
    assert box.exec("until [ -e /tmp/survived ]; do sleep 0.05; done", timeout=PATIENCE).ok


def test_a_background_child_that_never_stops_writing_does_not_hold_the_result(box: Sandbox) -> None:
    with start(box, "yes & echo started >&2") as process:
        assert process.wait().stderr == "started\n"
    assert box.exec("yes & echo started >&2", timeout=PATIENCE).stderr == "started\n"


@pytest.mark.parametrize("script", ["exec <&- >&- 2>&-; sleep 0.2; exit 3", "exec >/dev/null 2>&1; exit 3"])
@pytest.mark.parametrize("pty", [None, Terminal()])
def test_a_result_comes_whatever_was_closed(box: Sandbox, script: str, pty: Terminal | None) -> None:
    with start(box, script, pty=pty) as process:
        assert process.wait().exit_code == 3


def test_what_cannot_be_started(box: Sandbox) -> None:
    with start(box, ["no-such-program"]) as process:
        result = process.wait()
    assert result.exit_code == 127
    assert "no-such-program" in result.stderr
    with pytest.raises(FileAccessError, match="cannot enter /no/such"):
        start(box, "true", cwd="/no/such")


def test_many_processes_at_once_and_jobs_beside_them(box: Sandbox) -> None:
    processes = [start(box, ["cat"]) for _ in range(12)]
    for number, process in enumerate(processes):
        process.write(b"%d\n" % number)
    assert box.exec("echo beside").stdout == "beside\n"
    for number, process in enumerate(processes):
        process.until_output(b"%d\n" % number)
        process.connection.close()
    until_gone(box, "cat")


def test_a_worker_killed_from_inside_ends_its_process(box: Sandbox) -> None:
    with start(box, "echo some; kill -9 $PPID; sleep 65") as process:
        result = process.wait()
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, signal.SIGKILL)
    until_gone(box, "sleep 65")


def test_workers_of_ended_processes_do_not_stay(box: Sandbox) -> None:
    for _ in range(10):
        with start(box, "echo x") as process:
            process.wait()
    until(lambda: len(box.exec("ps -eo pid --no-headers").stdout.split()) <= 4)


def test_too_few_processes_left(spec: ImageSpec) -> None:
    script = "for i in $(seq 30); do sleep 1 & done; wait"
    with Sandbox.create(spec, limits=Limits(processes=12)) as box, start(box, script, timeout=PATIENCE) as process:
        assert process.wait().outcome is Outcome.EXITED


# --- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal(box: Sandbox) -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && stty size && echo err >&2 && tty && cat < /dev/tty"
    with start(box, script, pty=Terminal(30, 100)) as process:
        process.until_output(b"/dev/pts/")
        process.write(b"typed\n")
        process.until_output(b"typed\r\ntyped\r\n")
        process.close_stdin()
        result = process.wait()
    assert result.stdout.startswith("30 100\r\nerr\r\n/dev/pts/")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_terminal_is_resized(box: Sandbox) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    with start(box, script, pty=Terminal()) as process:
        process.until_output(b"ready")
        process.channel.resize(Terminal(50, 132))
        process.send()
        process.until_output(b"50 132")
    with start(box, ["cat"]) as process, pytest.raises(InvalidValue):
        process.channel.resize(Terminal())


def test_control_characters_are_the_terminals(box: Sandbox) -> None:
    with start(box, "echo ready; cat", pty=Terminal()) as process:
        process.until_output(b"ready")
        process.write(b"\x03")
        result = process.wait()
    assert (result.outcome, result.signal) in ((Outcome.SIGNALED, signal.SIGINT), (Outcome.EXITED, None))


def test_nothing_written_to_a_terminal_is_lost(box: Sandbox) -> None:
    for _ in range(5):
        with start(box, ["seq", "20000"], pty=Terminal()) as process:
            result = process.wait()
        assert result.stdout.split() == [str(n) for n in range(1, 20001)]


def test_an_interactive_shell_on_a_terminal(box: Sandbox) -> None:
    with start(box, ["bash", "--norc", "-i"], pty=Terminal()) as process:
        process.write(b"sleep 60\n")
        until(lambda: "sleep 60" in ps(box).splitlines())  # in the foreground: it was put there before it was started
        process.write(b"\x1a")
        process.write(b"jobs; kill -9 %1; exit 4\nexit 4\n")
        assert process.wait().exit_code == 4
    assert b"Stopped" in process.output()
    assert b"no job control" not in process.output()


def test_programs_for_terminals(box: Sandbox) -> None:
    with start(box, ["python3", "-q"], pty=Terminal()) as process:
        process.until_output(b">>> ")
        process.write(b"6*7\r")
        process.until(lambda: process.output().count(b">>> ") == 2 and b"42" in process.output())
        process.close_stdin()
        assert process.wait().exit_code == 0


def test_background_children_of_a_terminal(box: Sandbox) -> None:
    with start(box, "(trap '' HUP; exec sleep 66) & echo out", pty=Terminal()) as process:
        result = process.wait()
    assert (result.stdout, result.exit_code) == ("out\r\n", 0)


# --- lifetime of the sandbox -----------------------------------------------------------------------------------------


def test_a_process_outlives_its_holder_and_is_attached_to_again(box: Sandbox, door: socket.socket) -> None:
    with start(box, "echo one; cat", lifetime="sandbox", door=door) as process:
        process.until_output(b"one\n")
        pid = process.channel.pid
    with knock(door) as process:
        assert (process.channel.pid, process.channel.command) == (pid, "echo one; cat")
        process.write(b"two\n")
        process.until_output(b"two\n")
    with knock(door) as process:
        process.close_stdin()
        assert process.wait().exit_code == 0


def test_what_nobody_saw_is_kept_head_and_tail(box: Sandbox, door: socket.socket) -> None:
    script = "read x; yes | head -c 5000000; echo err >&2; touch /tmp/written; exit 9"
    with start(box, script, lifetime="sandbox", door=door, output=1000) as process:
        process.write(b"go\n")
    box.exec("until [ -e /tmp/written ]; do sleep 0.02; done", timeout=PATIENCE)
    with knock(door) as process:
        result = process.wait()
    assert result.exit_code == 9
    assert result.dropped_stdout == 5_000_000 - 1000
    assert result.stdout.startswith("y\ny\n")
    assert result.stderr == "err\n"


def test_an_unseen_result_waits_and_a_seen_one_does_not(box: Sandbox, door: socket.socket) -> None:
    with start(box, "echo out; exit 3", lifetime="sandbox", door=door) as process:
        process.until(lambda: process.channel.done)
    address = door.getsockname()
    door.close()
    for _ in range(2):
        with knock(address) as process:
            process.until(lambda: process.channel.done)
    with knock(address) as process:
        assert process.wait().exit_code == 3
    until(lambda: not is_open(address))


def is_open(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(address) == 0


def test_a_process_has_one_holder_at_a_time(box: Sandbox, door: socket.socket) -> None:
    with start(box, "cat", lifetime="sandbox", door=door) as first:
        for _ in range(3):
            with pytest.raises(InvalidValue, match="held by another handle"):
                knock(door)
        first.write(b"still mine\n")
        first.until_output(b"still mine\n")
        first.connection.close()
        for word in (b"second\n", b"third\n"):  # at once after the hang-up of the holder before
            with knock(door) as holder:
                holder.write(word)
                holder.until_output(word)


def test_a_holder_that_does_not_read_stays_the_holder(box: Sandbox, door: socket.socket) -> None:
    with start(box, ["yes"], lifetime="sandbox", door=door) as first:
        assert settled(lambda: in_queue(first.connection, termios.FIONREAD)) > 0
        with pytest.raises(InvalidValue, match="held by another handle"):
            knock(door)
        first.channel.kill()
        first.send()
        assert first.wait().signal == signal.SIGKILL


def in_queue(connection: socket.socket, which: int) -> int:
    """Bytes that have arrived unread, or that were sent and the peer has not read (unix(7))."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, which, count)
    return count[0]


def test_input_under_way_counts_for_the_next_holder(box: Sandbox, door: socket.socket) -> None:
    with start(box, "until [ -e /tmp/on ]; do sleep 0.05; done; wc -c", lifetime="sandbox", door=door) as process:
        process.write(bytes(1_000_000))
        until(lambda: in_queue(process.connection, termios.TIOCOUTQ) == 0)
    with knock(door) as process:
        box.files.write_text("/tmp/on", "")
        process.write(bytes(1_000_000))
        process.until(lambda: process.channel.unsent == 0)
        process.close_stdin()
        assert process.wait().stdout == "2000000\n"


def test_a_deadline_holds_without_a_holder(box: Sandbox, door: socket.socket) -> None:
    start(box, ["sleep", "67"], lifetime="sandbox", door=door, timeout=0.5).connection.close()
    until_gone(box, "sleep 67")
    with knock(door) as process:
        assert process.wait().outcome is Outcome.TIMEOUT


def test_the_end_of_the_sandbox_is_the_end_of_its_processes(box: Sandbox, door: socket.socket) -> None:
    with start(box, ["sleep", "68.625"], lifetime="sandbox", door=door) as process:
        box.stop()
        process.until(lambda: process.channel.done)
    assert running_with(b"sleep\x0068.625") == []
