"""Commands: fates are values, output is kept honestly, a deadline ends the whole tree and nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.errors import CommandFailed, FileAccessError, InvalidValue, SandboxGone
from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.types import ImageSpec, Limits, Outcome

pytestmark = pytest.mark.kernel


def test_a_string_is_a_bash_command_without_a_login_shell(box: Sandbox) -> None:
    result = box.exec("shopt -q login_shell; echo $?; echo ${BASH_VERSION:+bash} | tr a-z A-Z")
    assert result.stdout == "1\nBASH\n"
    assert result.ok
    assert result.check() is result


def test_a_list_is_an_argument_vector(box: Sandbox) -> None:
    result = box.exec(["printf", "%s|", "a b", "$HOME", "*", ""])
    assert result.stdout == "a b|$HOME|*||"


def test_stdout_and_stderr_stay_apart(box: Sandbox) -> None:
    result = box.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert result.outcome is Outcome.EXITED
    assert result.fate == "exit status 3"


def test_check_raises_with_the_result(box: Sandbox) -> None:
    with pytest.raises(CommandFailed, match="exit status 3") as caught:
        box.exec("echo why >&2; exit 3").check()
    assert caught.value.result.exit_code == 3
    assert "why" in str(caught.value)


def test_a_signal_is_a_value(box: Sandbox) -> None:
    result = box.exec(["sh", "-c", "kill -SEGV $$"])
    assert (result.outcome, result.signal, result.exit_code) == (Outcome.SIGNALED, 11, None)
    assert result.fate == "killed by SIGSEGV"


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("/etc/passwd", 126), ("/etc", 126)])
def test_what_cannot_be_run_is_a_shells_status(box: Sandbox, command: str, code: int) -> None:
    result = box.exec([command])
    assert result.exit_code == code
    assert command in result.stderr


def test_the_environment_is_ours_alone(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    result = box.exec(["env"], env={"GIVEN": "by the caller=really"})
    assert "s3cret" not in result.stdout
    assert "GIVEN=by the caller=really\n" in result.stdout
    assert "HOME=/root\n" in result.stdout


def test_variables_of_the_image_and_of_the_sandbox_reach_commands(spec: ImageSpec) -> None:
    image = ImageSpec("env", spec.layers, environment=(("FROM_IMAGE", "1"), ("BOTH", "image")))
    with Sandbox.create(image, environment={"BOTH": "sandbox"}) as box:
        assert box.exec("echo $FROM_IMAGE $BOTH").stdout == "1 sandbox\n"


def test_cwd(box: Sandbox) -> None:
    assert box.exec("pwd").stdout == "/\n"
    assert box.exec("pwd", cwd="/usr/bin").stdout == "/usr/bin\n"
    assert box.exec("pwd", cwd="usr").stdout == "/usr\n"
    with pytest.raises(FileAccessError, match="cannot enter /no/such") as caught:
        box.exec("pwd", cwd="/no/such")
    assert caught.value.errno == 2


def test_stdin_is_empty_unless_given(box: Sandbox) -> None:
    assert box.exec("cat; echo end", timeout=PATIENCE).stdout == "end\n"
    assert box.exec("cat", stdin="text\n").stdout == "text\n"
    data = bytes(range(256)) * 4096
    assert box.exec("sha256sum", stdin=data).stdout == box.exec("sha256sum", stdin=data).stdout
    assert box.exec(["wc", "-c"], stdin=data).stdout.strip() == str(len(data))


def test_a_command_that_never_reads_its_stdin(box: Sandbox) -> None:
    assert box.exec("exit 4", stdin=b"x" * 3_000_000, timeout=PATIENCE).exit_code == 4


def test_bytes_that_are_not_text(box: Sandbox) -> None:
    result = box.exec(r"printf '\xff\xfe\x00ok\xc3'")
    assert result.stdout_bytes == b"\xff\xfe\x00ok\xc3"
    assert result.stdout == "��\0ok�"


def test_arguments_that_are_not_utf8(box: Sandbox) -> None:
    assert box.exec(["printf", "%s", "caf\udce9"]).stdout_bytes == b"caf\xe9"


def test_a_script_longer_than_an_argument_may_be(box: Sandbox) -> None:
    script = "true\n" * 60_000 + "echo $0 done; exit 5"
    result = box.exec(script)
    assert result.stdout.endswith("done\n")
    assert result.exit_code == 5


def test_head_and_tail_of_long_output_are_kept_and_counted(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(output=1000)) as box:
        result = box.exec("seq 1 100000; echo tail-of-errors >&2")
    whole = sum(len(f"{number}\n") for number in range(1, 100_001))
    assert result.stdout.startswith("1\n2\n3\n")
    assert result.stdout.endswith("99999\n100000\n")
    assert result.dropped_stdout == whole - 1000
    assert f"[... {result.dropped_stdout} bytes dropped ...]" in result.stdout
    assert (result.stderr, result.dropped_stderr) == ("tail-of-errors\n", 0)


def test_a_timeout_keeps_partial_output_and_says_so(box: Sandbox) -> None:
    started = time.monotonic()
    result = box.exec("echo before; sleep 600; echo after", timeout=0.3)
    assert time.monotonic() - started < PATIENCE
    assert (result.outcome, result.stdout, result.exit_code) == (Outcome.TIMEOUT, "before\n", None)
    assert result.duration >= 0.3
    assert "timed out" in result.fate


DAEMONS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)
for n in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in (0, 1, 2): os.close(fd)
            time.sleep(300)
        os._exit(0)
time.sleep(300)
"""


def test_a_timeout_ends_daemons_of_the_command_and_nothing_else(box: Sandbox) -> None:
    other = threading.Thread(target=box.exec, args=("until [ -e /tmp/on ]; do sleep 0.031; done",))
    other.start()
    until(lambda: "sleep 0.031" in box.exec("ps -eo args").stdout)
    result = box.exec(["python3", "-c", DAEMONS], timeout=1.0)
    assert result.outcome is Outcome.TIMEOUT
    alive = box.exec("ps -eo args").stdout
    assert "time.sleep(300)" not in alive
    assert "sleep 0.031; done" in alive
    box.files.write_text("/tmp/on", "")
    other.join(PATIENCE)
    assert not other.is_alive()


def test_background_children_do_not_hold_the_result(box: Sandbox) -> None:
    started = time.monotonic()
    result = box.exec("sleep 600 & echo started")
    assert time.monotonic() - started < PATIENCE
    assert (result.stdout, result.exit_code, result.left_running) == ("started\n", 0, 1)
    assert "sleep 600" in box.exec("ps -eo args").stdout


def test_background_children_may_go_on_writing(box: Sandbox) -> None:
    box.exec("(sleep 0.2; for i in $(seq 2000); do echo line of output $i; done; touch /tmp/survived) &")
    assert box.exec("until [ -e /tmp/survived ]; do sleep 0.05; done", timeout=PATIENCE).ok


def test_commands_run_at_the_same_time(box: Sandbox) -> None:
    meet = "touch /tmp/meet-{n}; until [ $(ls -d /tmp/meet-* | wc -l) = 8 ]; do sleep 0.01; done; echo {n}"
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(box.exec(meet.format(n=n), timeout=60).stdout))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{n}\n" for n in range(8)]


def test_many_commands_one_after_the_other(box: Sandbox) -> None:
    for number in range(200):
        assert box.exec(["echo", str(number)]).stdout == f"{number}\n"
    assert len(box.exec("ps -eo pid --no-headers").stdout.split()) < 8


def test_an_idle_sandbox_is_one_process_and_wakes_up(box: Sandbox) -> None:
    threads = [threading.Thread(target=box.exec, args=("sleep 0.1",)) for _ in range(4)]
    for _ in range(2):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threads = [threading.Thread(target=box.exec, args=("sleep 0.1",)) for _ in range(4)]
        pid = next(record.pid for record in live_sandboxes() if record.id == box.id)
        children = Path(f"/proc/{pid}/task/{pid}/children")
        until(lambda children=children: not children.read_text(encoding="ascii"))  # type: ignore[misc] # a worker's patience is a second
    assert box.exec("echo awake", timeout=PATIENCE).stdout == "awake\n"


def test_a_distant_deadline(box: Sandbox) -> None:
    assert box.exec("sleep 0.1; echo done", timeout=3_000_000).stdout == "done\n"


def test_usage_is_reported(box: Sandbox) -> None:
    usage = box.exec(["python3", "-c", "x = bytearray(50_000_000); sum(range(2_000_000))"]).usage
    assert usage.user + usage.system > 0.01
    assert usage.max_rss > 50_000_000


def test_a_command_may_kill_everything_it_sees(box: Sandbox) -> None:
    result = box.exec("kill -9 -1", timeout=PATIENCE)
    assert result.outcome in (Outcome.SIGNALED, Outcome.EXITED)
    assert box.exec("echo still here", timeout=PATIENCE).stdout == "still here\n"


def test_limits_hold_for_every_command(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(processes=40, open_files=64, file_size="1M", disk="8M")) as box:
        assert box.exec("ulimit -Hn; ulimit -Hc").stdout.split() == ["64", "0"]
        bomb = box.exec("for i in $(seq 100); do sleep 2 & done; true", timeout=30)
        assert "Resource temporarily unavailable" in bomb.stderr
        refused = box.exec(["true"])
        assert refused.exit_code in (0, 126)
        until(lambda: box.exec(["true"]).ok)
        assert box.exec("head -c 2M /dev/zero > /tmp/big").exit_code != 0
        full = box.exec("for i in 1 2 3 4 5 6 7 8 9 10; do head -c 1000000 /dev/zero > /testbed/$i || exit 9; done")
        assert full.exit_code == 9
        assert "No space left" in full.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("", {}),
        ([], {}),
        (["a\0b"], {}),
        ("true", {"timeout": 0}),
        ("true", {"timeout": -1.0}),
        ("true", {"timeout": float("inf")}),
        ("true", {"timeout": float("nan")}),
        ("true", {"timeout": 1e10}),
        ("true", {"env": {"A=B": "c"}}),
        ("true", {"env": {"": "c"}}),
    ],
)
def test_bad_arguments_are_refused(box: Sandbox, command: str | list[str], options: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        box.exec(command, **options)  # type: ignore[arg-type]


def test_after_stop_nothing_runs(spec: ImageSpec) -> None:
    box = Sandbox.create(spec)
    box.stop()
    box.stop()
    with pytest.raises(SandboxGone):
        box.exec("true")


def test_a_sandbox_that_ends_during_a_command_is_not_a_fate(spec: ImageSpec) -> None:
    box = Sandbox.create(spec)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            box.exec("sleep 60", timeout=50)
        except SandboxGone as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: "sleep 60" in box.exec("ps -eo args").stdout)
    box.stop()
    thread.join(PATIENCE)
    assert len(caught) == 1


@pytest.mark.parametrize("number", ["STOP", "KILL"])
def test_a_worker_that_is_attacked_from_inside_loses_its_command_and_nothing_else(box: Sandbox, number: str) -> None:
    script = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    time.sleep(300)
os.kill(os.getppid(), signal.SIG{number})
time.sleep(300)
"""
    result = box.exec(["python3", "-c", script], timeout=PATIENCE)
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, 9)
    assert box.exec("echo after", timeout=PATIENCE).stdout == "after\n"
    until(lambda: "time.sleep" not in box.exec("ps -eo args").stdout)
