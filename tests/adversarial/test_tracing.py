"""Processes that stop at their end for one another (PTRACE_O_TRACEEXIT): in a ring they would never end.

Whoever changes what is tested here tries it where a restart of the machine harms nobody: nothing else ends such a ring.
"""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import threading
from collections.abc import Iterator

import pytest
from tests.waiting import running, stat_fields, until

from minisandbox.launch import tracing
from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.types import ImageSpec, Output

pytestmark = pytest.mark.kernel

TRACING = """
import ctypes, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # with it whoever is traced would be stopped
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes, libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
OLDSETOPTIONS, SETOPTIONS, SEIZE, INTERRUPT, DETACH, CONT = 21, 0x4200, 0x4206, 0x4207, 17, 7
TRACEFORK, TRACEEXIT, WALL = 0x2, 0x40, 0x40000000

def ptrace(request, pid, data=0):
    return 0 if libc.ptrace(request, pid, 0, data) != -1 else ctypes.get_errno()

def trace(pid, way, more=0):
    # the last call's errno: of the one that asks for the option
    if way == SEIZE:
        return ptrace(SEIZE, pid, TRACEEXIT | more)
    error = ptrace(SEIZE, pid) or ptrace(INTERRUPT, pid)
    if error:
        raise OSError(error, "to attach")
    os.waitpid(pid, WALL)
    error = ptrace(way, pid, TRACEEXIT | more)
    ptrace(DETACH if error else CONT, pid)
    return error

def told(*answers):
    print(*answers, flush=True)
"""

CHAIN = """
way, come = int(sys.argv[1]), os.pipe()
third = os.fork()
second = third and os.fork()
if third and second == 0:
    os.read(come[0], 1)  # we are traced now
    told("traced", trace(third, way))
elif third:
    told("tracer", trace(second, way))
    os.write(come[1], b".")
time.sleep(600)
"""

TWO = """
first, way, come = os.getpid(), int(sys.argv[1]), os.pipe()
second = os.fork()
if second == 0:
    os.read(come[0], 1)  # we are traced now
    told("traced", trace(first, way))
else:
    told("tracer", trace(second, way))
    os.write(come[1], b".")
time.sleep(600)
"""

CHILD = """
first, come = os.getpid(), os.pipe()
second = os.fork()
if second == 0:
    os.read(come[0], 1)
    if os.fork() == 0:  # it is traced from its birth
        told("child", trace(first, SEIZE))
    time.sleep(600)
told("tracer", trace(second, SEIZE, TRACEFORK))
os.write(come[1], b".")
while True:
    pid, _ = os.waitpid(-1, WALL)
    ptrace(CONT, pid)
"""

STORM = """
everybody = []
while len(everybody) < 16 and 0 not in everybody:
    everybody.append(os.fork())
time.sleep(0.3)
if 0 in everybody:
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for pid in others:
            ptrace(SEIZE, pid, TRACEEXIT | TRACEFORK)
    time.sleep(600)
time.sleep(4)
seized = 0
for pid in everybody:
    with open(f"/proc/{pid}/status") as source:
        seized += "TracerPid:\\t0" not in source.read()
told("traced", seized)
time.sleep(600)
"""


def everything_in(box: Sandbox) -> set[int]:
    """Every process of a sandbox, as the host counts."""
    found = {next(record.pid for record in live_sandboxes() if record.id == box.id)}
    while below := {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) in found} - found:
        found |= below
    return found


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


WAYS = pytest.mark.parametrize("way", [21, 0x4200, 0x4206], ids=["oldsetoptions", "setoptions", "seize"])


@WAYS
def test_whom_somebody_traces_does_not_trace_another_so(spec: ImageSpec, way: int) -> None:
    """As the two below, but without a ring, which would be for ever: this one is tried first."""
    assert attack(spec, CHAIN, way) == ["tracer 0", f"traced {errno.EPERM}"]


@WAYS
def test_two_do_not_trace_each_other_so(spec: ImageSpec, way: int) -> None:
    assert attack(spec, TWO, way) == ["tracer 0", f"traced {errno.EPERM}"]


def test_a_child_of_who_is_traced_does_not_either(spec: ImageSpec) -> None:
    assert attack(spec, CHILD) == ["tracer 0", f"child {errno.EPERM}"]


def test_of_many_that_try_at_once_none_is_left(spec: ImageSpec) -> None:
    assert attack(spec, STORM, lines=1) != ["traced 0"], "some may trace others"


def attack(spec: ImageSpec, script: str, way: int = 0x4206, *, lines: int = 2) -> list[str]:
    """What the script says; the sandbox is ended while its processes trace one another, and nothing is left of it."""
    if way == 21 and platform.machine() != "x86_64":
        pytest.skip("PTRACE_OLDSETOPTIONS is of x86")
    said = ""
    with Sandbox.create(spec) as box, box.start(["python3", "-c", TRACING + script, str(way)]) as process:
        for event in process.events():
            assert isinstance(event, Output), event
            assert event.stream == "stdout", event
            said += event.data.decode()
            if said.count("\n") == lines:
                break
        inside = everything_in(box)
        assert len(inside) > 3
        box.stop()
    until(lambda: not any(map(running, inside)))
    return said.splitlines()


def test_strace_works(box: Sandbox) -> None:
    """It asks for that option whenever it starts a program or attaches to one."""
    if not box.exec("command -v strace").ok:
        pytest.skip("there is no strace here")
    result = box.exec(
        "strace -f -o /tmp/trace sh -c 'sleep 0 & wait; exit 3'; echo $?; grep -c '+++ exited' /tmp/trace"
    )
    assert result.stdout == "3\n2\n"
    box.exec("sleep 1 & strace -o /tmp/trace -p $!; wait").check()
    assert "+++ exited with 0 +++" in box.files.read_text("/tmp/trace")


# --- who is allowed: nothing is traced here, only asked about --------------------------------------------------------


@pytest.fixture
def somebody() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_whom_somebody_may_trace_may_not(somebody: subprocess.Popen[bytes]) -> None:
    asked, us = tracing.Tracing(-1), threading.get_native_id()
    assert asked._allow(us, somebody.pid)
    assert asked._allow(us, somebody.pid), "it may ask again"
    assert not asked._allow(somebody.pid, us)
    assert not asked._allow(somebody.pid, 1)


def test_a_tracer_that_has_ended_keeps_nobody(somebody: subprocess.Popen[bytes]) -> None:
    asked, us = tracing.Tracing(-1), threading.get_native_id()
    assert asked._allow(somebody.pid, us)
    assert not asked._allow(us, 1)
    somebody.kill()
    somebody.wait()
    assert asked._allow(us, 1)
    assert not asked._allow(somebody.pid, 1), "who has ended is not allowed anything"


def test_another_thread_of_whom_somebody_may_trace_may_not(somebody: subprocess.Popen[bytes]) -> None:
    """With execve(2) it would take the number of the first one, and with it the tracer that is about to come."""
    asked, answers = tracing.Tracing(-1), list[bool]()
    assert asked._allow(somebody.pid, os.getpid())
    thread = threading.Thread(target=lambda: answers.append(asked._allow(threading.get_native_id(), somebody.pid)))
    thread.start()
    thread.join()
    assert answers == [False]


def test_a_thread_that_takes_the_number_of_its_process_may_not_either(somebody: subprocess.Popen[bytes]) -> None:
    """With execve(2) it does, and who was about to trace it by its own number traces it then."""
    asked, answers = tracing.Tracing(-1), list[bool]()
    thread = threading.Thread(target=lambda: answers.append(asked._allow(somebody.pid, threading.get_native_id())))
    thread.start()
    thread.join()
    assert answers == [True]
    assert not asked._allow(os.getpid(), somebody.pid)


def test_what_is_kept_in_mind_is_bounded(somebody: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST", 10)
    asked, us = tracing.Tracing(-1), threading.get_native_id()
    answers = [asked._allow(somebody.pid, 100_000_000 + number) for number in range(20)]
    assert answers == [True] * 10 + [False] * 10
    assert not asked._allow(us, 1)
    somebody.kill()
    somebody.wait()
    assert asked._allow(us, 1), "there is room again"


def test_who_cannot_be_looked_at_is_refused() -> None:
    assert not tracing.Tracing(-1)._allow(100_000_000, 1)


def test_a_signal_costs_nobody_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGCHLD came while pid 1 waited to give it: who had asked waited for ever."""
    sent, interruptions = [], iter([InterruptedError(), InterruptedError()])

    def ioctl(_: int, request: int, data: bytearray) -> None:
        if request == tracing._SEND:
            if (error := next(interruptions, None)) is not None:
                raise error
            sent.append(bytes(data))

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    tracing.Tracing(-1).answer()
    assert sent == [tracing._ANSWER.pack(0, 0, -errno.EPERM, 0)]
