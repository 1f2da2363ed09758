"""Attacks on those who watch: pid 1, the workers, their deadlines and limits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, running, stat_fields, until

from minisandbox.errors import SandboxGone
from minisandbox.launch.jobs.frames import Header, encode
from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.sandbox.controller import current_controller
from minisandbox.sandbox.protocol import wire
from minisandbox.sandbox.protocol.wire import ExecCall
from minisandbox.types import ImageSpec, Limits, Outcome

pytestmark = pytest.mark.kernel


def test_pid_1_outlives_an_interrupt(box: Sandbox) -> None:
    box.exec("kill -INT 1; sleep 0.2")
    assert box.exec("echo alive").stdout == "alive\n"


@pytest.mark.parametrize("limit", ["--nproc=0", "--nofile=0"])
def test_pid_1_outlives_limits_set_from_inside(box: Sandbox, limit: str) -> None:
    box.exec(f"prlimit --pid 1 {limit}; kill -9 $PPID", timeout=PATIENCE)
    box.exec("true", timeout=PATIENCE)  # pid 1 has to make a worker for it
    assert box.alive


LEADERLESS = """
import ctypes, os, threading, time
def go_on():
    while True:
        time.sleep(0.05)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2): this thread alone ends, and /proc calls the process a zombie
"""


def test_a_timeout_ends_a_process_without_its_first_thread(box: Sandbox) -> None:
    box.files.write_text("/tmp/leaderless.py", LEADERLESS)
    result = box.exec("python3 /tmp/leaderless.py", timeout=0.5)
    assert result.outcome is Outcome.TIMEOUT
    assert box.exec("ps -eLo args | grep -c '[l]eaderless'").stdout == "0\n"


FORKS = """
import os, time
for uid in range(100, 105):
    if os.fork() == 0:
        os.setuid(uid)
        for _ in range(40):
            try:
                if os.fork() == 0:
                    break
            except OSError:
                break
        time.sleep(3)
        os._exit(0)
time.sleep(1)
print(sum(name.isdigit() for name in os.listdir("/proc")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox has one uid")
def test_other_uids_do_not_get_round_the_limit_of_processes(spec: ImageSpec) -> None:
    launcher = current_controller().launcher
    if launcher.enforcement["processes"] == "rlimit" and launcher.ids > 1:
        pytest.xfail("RLIMIT_NPROC counts each uid for itself, and without control groups there is nothing else")
    with Sandbox.create(spec, limits=Limits(processes=50)) as box:
        result = box.exec(["python3", "-c", FORKS], timeout=PATIENCE)
        assert int(result.stdout) <= 60, "with pid 1 and the workers"


def test_a_worker_killed_before_its_note_is_read_loses_no_job(spec: ImageSpec) -> None:
    """Pid 1 is held so that both are there at once, as they may be on a busy machine: the note, and the end."""
    for _ in range(12):  # which of the two it sees first is chance
        with Sandbox.create(spec) as box:
            box.exec("true")
            end_a_worker_unseen(box)
            answers: list[str] = []
            asking = threading.Thread(target=lambda box, answers: answers.append(fate(box)), args=(box, answers))
            asking.start()
            asking.join(PATIENCE)
            box.stop()
            asking.join()
            assert answers == ["exit status 0"]


def end_a_worker_unseen(box: Sandbox) -> None:
    first = next(record.pid for record in live_sandboxes() if record.id == box.id)
    os.kill(first, signal.SIGSTOP)
    until(lambda: (stat_fields(first) or "?")[0] == "T")
    try:
        box.exec("true")
        workers = children(first)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(running, workers)))
    finally:
        os.kill(first, signal.SIGCONT)


def fate(box: Sandbox) -> str:
    try:
        return box.exec("true", timeout=PATIENCE).fate
    except SandboxGone:
        return "gone"


def children(parent: int) -> list[int]:
    """Pids of the live children of a process, as the host counts."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == parent and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


GOOD: Header = {
    "event": "exit", "status": 0, "timed_out": False, "duration": 0.0, "usage": [0.0, 0.0, 0],
    "left_running": 0, "dropped": [0, 0], "stdout_size": 0,
}  # fmt: skip


def changed(**values: object) -> bytes:
    return encode({**GOOD, **values})


@pytest.mark.parametrize(
    "answer",
    [
        changed(status="0"),
        changed(status=1 << 40),
        changed(dropped=[]),
        b"\0\x03\x0d\x40\0\0\0\0" + b"[" * 200_000,
    ],
    ids=["type", "number", "length", "depth"],
)
def test_nonsense_from_a_worker_is_an_error_of_ours(answer: bytes) -> None:
    """A worker is not to be trusted once it is attacked; the controller must know what it catches."""
    call = ExecCall("true", env={}, cwd="/", timeout=None, stdin=None, output=1000)
    with pytest.raises(SandboxGone):
        call.feed(answer)


def test_a_stopped_supervisor_is_no_longer_waited_for(box: Sandbox) -> None:
    result = box.exec("kill -STOP $PPID; sleep 600", timeout=None)
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, signal.SIGKILL)
    assert box.exec("pgrep -c sleep").stdout == "0\n", "what it had started is ended"


STOPPER = """
import os, signal
def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as source:
        return map(int, source.read().split())
open("/tmp/ready", "w").close()
while True:
    for worker in children(1):
        try:
            for pid in children(worker):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGSTOP)
        except OSError:
            pass
"""


def test_a_call_whose_supervisor_is_held_ends_in_bounded_time(spec: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its child executes something, a supervisor is held (vfork(2)); here that child is stopped before."""
    monkeypatch.setattr(wire, "_DEADLINE_GRACE", 3.0)
    path = "/tmp/not-executable:" * 5000 + "/usr/bin:/bin"
    with Sandbox.create(spec) as box:
        box.files.write_text("/tmp/not-executable/sleep", "no program")
        box.files.write_text("/tmp/stopper.py", STOPPER)
        with box.start(["python3", "/tmp/stopper.py"]):
            until(lambda: any(found.path.name == "ready" for found in box.files.list("/tmp")))
            with pytest.raises(SandboxGone, match="did not answer"):
                box.exec(["sleep", "600"], env={"PATH": path}, timeout=1.0)
            assert not box.alive


def test_a_command_that_has_its_supervisor_trace_it_is_ended(spec: ImageSpec) -> None:
    """The kernel tells a tracer of stops as of ends."""
    code = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"
    with Sandbox.create(spec) as box:
        result = box.exec(["python3", "-c", code], timeout=60)
        assert (result.outcome, result.signal) == (Outcome.SIGNALED, signal.SIGKILL)
        assert box.exec("echo on").stdout == "on\n"


def test_what_cannot_be_started_for_other_reasons_met_no_limit(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        result = box.exec("true", env={"A": "x" * 200_000})
        assert (result.exit_code, result.limits_hit) == (126, ())


def test_a_time_that_no_call_sets_is_the_latest_that_one_does(spec: ImageSpec, tmp_path: Path) -> None:
    with Sandbox.create(spec) as box:
        box.exec("mkdir /tmp/t && touch -d 2120-01-01 /tmp/t/f && echo x > /tmp/t/g").check()
        box.files.download("/tmp/t", tmp_path / "t")
        assert (tmp_path / "t/g").read_text() == "x\n"
        assert (tmp_path / "t/f").stat().st_mtime > 4e9
