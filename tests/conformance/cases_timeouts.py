"""Timeouts: they end the whole tree of a command and nothing else, and keep what it printed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, count, runs, until

from minisandbox.types import ExecResult, Outcome
from minisandbox.values import MiB

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox

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
open("ready", "w").close()
time.sleep(300)
"""


@case("a timeout is a value, with what was printed before")
async def case_partial_output(box: AsyncSandbox) -> None:
    started = time.monotonic()
    result = await box.exec("echo before; echo err >&2; sleep 600; echo after", timeout=0.5)
    assert time.monotonic() - started < 60
    assert (result.outcome, result.exit_code, result.signal) == (Outcome.TIMEOUT, None, None)
    assert (result.stdout, result.stderr) == ("before\n", "err\n")
    assert result.duration >= 0.5
    assert "timed out" in result.fate
    assert not result.ok


@case("a timeout ends what ignores every signal that can be ignored")
async def case_ignored_signals(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"trap '' TERM HUP INT QUIT; sleep {mark}; sleep {mark}", timeout=0.5)
    assert result.outcome is Outcome.TIMEOUT
    assert not await runs(box, f"sleep {mark}")


@case("a timeout ends daemons: own session, forked twice, descriptors closed")
async def case_daemons(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(["python3", "-S", "-c", DAEMONS, mark], timeout=2.0)
    assert result.outcome is Outcome.TIMEOUT
    assert await box.files.exists("ready")
    assert not await runs(box, mark)


@case("a timeout ends setsid, nohup and disowned children")
async def case_setsid(box: AsyncSandbox) -> None:
    mark = a_while()
    script = "setsid sleep $M & nohup sleep $M >/dev/null 2>&1 & (sleep $M & disown) ; setsid -f sleep $M; wait"
    result = await box.exec(script, env={"M": mark}, timeout=1.0)
    assert result.outcome is Outcome.TIMEOUT
    assert not await runs(box, mark)


@case("a timeout ends nothing else: neither another command nor what an earlier one left")
async def case_nothing_else(make: World, box: AsyncSandbox) -> None:
    left, other = a_while(), a_while()
    await box.exec(f"sleep {left} >/dev/null 2>&1 &")

    async def bystander() -> ExecResult:
        return await box.exec(f"sleep {other} & sleep 2; echo done; kill %1", timeout=60)

    async def culprit() -> ExecResult:
        return await box.exec("sleep 60 & sleep 60", timeout=0.5)

    fine, late = await make.together(bystander(), culprit())
    assert late.outcome is Outcome.TIMEOUT
    assert (fine.outcome, fine.stdout) == (Outcome.EXITED, "done\n")
    assert await runs(box, left)


@case("a timeout ends a tree that keeps forking", needs="kernel")
async def case_forking_tree(make: World, box: AsyncSandbox) -> None:
    mark = a_while()

    async def has_room() -> bool:  # the kernel counts thousands of killed processes until it has ended each
        return (await box.exec(["true"], timeout=60)).ok

    program = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() and os.getpid() % 2: os._exit(0)
    except OSError: pass
"""
    result = await box.exec(["python3", "-S", "-c", program, mark], timeout=1.0)
    assert result.outcome in (Outcome.TIMEOUT, Outcome.EXITED)
    if result.outcome is Outcome.TIMEOUT:
        await until(make, has_room)
        assert not await runs(box, mark)


@case("a timeout ends a stopped process")
async def case_stopped_process(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"echo before; sleep {mark} & kill -STOP $! $$", timeout=0.5)
    assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, "before\n")
    assert not await runs(box, mark)


@case("a timeout ends a process whose first thread has ended")
async def case_threads(box: AsyncSandbox) -> None:
    mark = a_while()
    program = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(300,)).start()
print("threads", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    result = await box.exec(["python3", "-c", program, mark], timeout=1.5)
    assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, "threads\n")
    assert not await runs(box, mark)


@case("a timeout while output floods in: bounded, counted, ended")
async def case_flood(box: AsyncSandbox) -> None:
    result = await box.exec("yes", timeout=0.5)
    assert result.outcome is Outcome.TIMEOUT
    assert len(result.stdout_bytes) < MiB + 100
    assert result.dropped_stdout > 0


@case("a timeout while stdin is not read")
async def case_unread_stdin(box: AsyncSandbox) -> None:
    result = await box.exec("echo on; sleep 60", stdin=b"x" * 5_000_000, timeout=0.5)
    assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, "on\n")


@case("a command that ends in time is not touched by its timeout, however distant")
async def case_in_time(box: AsyncSandbox) -> None:
    for timeout in (20, 20.5, 3_000_000):
        result = await box.exec("sleep 0.1; echo done", timeout=timeout)
        assert (result.outcome, result.stdout) == (Outcome.EXITED, "done\n")


@case("each of many commands at once has its own timeout")
async def case_many_timeouts(make: World, box: AsyncSandbox) -> None:
    async def late(tenths: int) -> ExecResult:
        return await box.exec("sleep 60", timeout=tenths / 10)

    results = await make.together(*(late(tenths) for tenths in range(2, 14)))
    assert {result.outcome for result in results} == {Outcome.TIMEOUT}
    assert all(tenths / 10 <= r.duration < tenths / 10 + 10 for tenths, r in zip(range(2, 14), results, strict=True))


@case("a timeout covers a pipeline and its subshells")
async def case_pipeline(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"(sleep {mark}; echo a) | (cat; sleep {mark}) | cat", timeout=0.5)
    assert result.outcome is Outcome.TIMEOUT
    assert await count(box, mark) == 0


@case("after a timeout the sandbox takes the next command")
async def case_after(box: AsyncSandbox) -> None:
    for _ in range(5):
        assert (await box.exec("sleep 60", timeout=0.1)).outcome is Outcome.TIMEOUT
        assert (await box.exec("echo next")).stdout == "next\n"
