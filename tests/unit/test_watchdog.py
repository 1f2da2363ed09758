"""What the watchdog counts, of real processes of this machine, and when it looks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from minisandbox.launch import init, watchdog
from minisandbox.launch.kernel.cgroups import LimitCounters

MIB = 1 << 20
HOLD = """
import os, sys
held = bytearray(64 << 20)
held[::4096] = bytes(len(held[::4096]))
{more}
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """How often everything was to be ended."""
    found: list[object] = []
    monkeypatch.setattr(watchdog, "end_all", found.append)
    monkeypatch.setattr(watchdog, "_CONFIRMATION", 0.0)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.0)
    monkeypatch.setattr(watchdog, "_SHARE", 0)
    return found


def holding(more: str = "") -> Iterator[int]:
    """Run a process that holds 64 MiB; yield its pid."""
    command = [sys.executable, "-c", HOLD.format(more=more)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"")


def watch(monkeypatch: pytest.MonkeyPatch, limit: int, *pids: int) -> watchdog.Watchdog:
    monkeypatch.setattr(watchdog, "every_pid", lambda: [*pids])
    return watchdog.Watchdog(limit, LimitCounters(None))


def test_two_looks_in_a_row_that_find_too_much_end_it(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in holding():
        looks = watch(monkeypatch, 32 * MIB, pid)
        looks.check(())
        assert ended == []
        looks.check(())
        assert ended == [()]


def test_one_that_ends_while_it_is_looked_at_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its status and its share: it shows no share then, as does a process that hides its own."""
    with subprocess.Popen(["sleep", "60"]) as process:
        rows = watchdog._rows

        def ends(path: str) -> dict[bytes, bytes]:
            if path.endswith("/smaps_rollup"):
                process.kill()
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return rows(path)

        monkeypatch.setattr(watchdog, "_rows", ends)
        found = watchdog._read(process.pid)
        assert found is not None
        assert not watch(monkeypatch, found.memory - 1, process.pid)._exceeds_limit([process.pid])


def test_an_excess_that_passes_ends_nothing(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in holding():
        looks = watch(monkeypatch, 32 * MIB, pid)
        looks.check(())
        monkeypatch.setattr(watchdog, "every_pid", list)
        looks.check(())
        monkeypatch.setattr(watchdog, "every_pid", lambda pid=pid: [pid])
        looks.check(())
        assert ended == []


def test_who_is_not_there_at_both_looks_does_not_count(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for first in holding():
        for second in holding():
            looks = watch(monkeypatch, 32 * MIB, first)
            looks.check(())
            monkeypatch.setattr(watchdog, "every_pid", lambda pid=second: [pid])
            looks.check(())
    assert ended == []


def test_what_is_ours_or_below_the_limit_is_left_alone(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in holding():
        for ours, limit in (((pid,), 32 * MIB), ((), 256 * MIB)):
            looks = watch(monkeypatch, limit, pid)
            for _ in range(4):
                looks.check(ours)
    assert ended == []


def test_what_processes_share_counts_once(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    more = "for _ in range(3):\n    if os.fork() == 0:\n        sys.stdin.read()\n        os._exit(0)"
    for pid in holding(more):
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as source:
            children = [int(word) for word in source.read().split()]
        assert len(children) == 3
        looks = watch(monkeypatch, 128 * MIB, pid, *children)
        for _ in range(2):
            looks.check(())
        assert ended == []
        assert sum(map(watchdog._resident, (pid, *children))) > 128 * MIB, "it was not a quick look that decided"


def test_a_child_that_has_its_parents_memory_still_counts_nothing() -> None:
    """As after vfork(2); but one such child at most, and none of a parent that goes on."""
    waiting = {
        1: watchdog._Process(0, True, 50),
        2: watchdog._Process(1, False, 50),
        3: watchdog._Process(1, False, 50),
    }
    assert len(watchdog._vforked(waiting)) == 1
    assert watchdog._vforked({**waiting, 1: watchdog._Process(0, False, 50)}) == set()
    assert watchdog._vforked({1: waiting[1], 2: watchdog._Process(1, False, 49)}) == set()


def test_a_process_that_has_ended_holds_nothing() -> None:
    assert watchdog._read(0) is None
    assert watchdog._resident(0) == 0


def test_looks_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at 200 processes takes 2 ms; pid 1 has something to do at each end of a process."""
    times = iter([0.0, 0.002, 0.0, 1.0])
    monkeypatch.setattr("time.process_time", lambda: next(times))
    looks = watch(monkeypatch, 1 << 40, os.getpid())
    looks.check(())
    assert 0.25 < looks.wait() <= 0.3
    looks.check(())  # it is not time to
    looks._due = 0.0
    looks.check(())
    assert 1.9 < looks.wait() <= watchdog.LONGEST_INTERVAL


def test_nobody_but_pid_1_ends_everything() -> None:
    with pytest.raises(RuntimeError, match="not the first process"):
        watchdog.end_all(())


def test_a_failed_fork_outside_a_sandbox_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake sandbox runs the loop of pid 1 among all processes of the machine."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *arguments: kills.append(arguments))
    monkeypatch.setattr("os.fork", Mock(side_effect=BlockingIOError))
    loop = init.Init.__new__(init.Init)
    loop._workers, loop._primary_pid = set(), 0
    with pytest.raises(RuntimeError, match="not the first process"):
        loop.fork_worker()
    assert kills == []
