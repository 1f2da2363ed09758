"""Starting a program: its score for the OOM killer, also where the kernel first refuses to let us write it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minisandbox.launch.jobs import spawn as module
from minisandbox.launch.jobs.frames import Header
from minisandbox.launch.jobs.spawn import Stdio, spawn


def own_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Come back to this directory: a worker is at / between two commands."""
    monkeypatch.chdir(Path.cwd())


@contextmanager
def sleeping() -> Iterator[int]:
    request: Header = {"argv": ["sleep", "60"], "env": [["PATH", os.defpath]], "cwd": "/", "user": None}
    pid = spawn(request, Stdio())
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def refuse(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Have the first attempts to write fail, as for a child that is not dumpable yet; returns the refused paths."""
    refused: list[str] = []
    real = os.open

    def opening(path: str, flags: int) -> int:
        if path.endswith("/oom_score_adj") and len(refused) < times:
            refused.append(path)
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", opening)
    return refused


def test_the_oom_killer_prefers_a_command_to_its_worker() -> None:
    with sleeping() as pid:
        assert score_of(pid) == min(own_score() + 500, 1000)


@pytest.mark.parametrize("times", [1, 8])
def test_a_score_that_is_refused_while_the_child_executes_is_written_later(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    refused = refuse(monkeypatch, times)
    with sleeping() as pid:
        assert score_of(pid) == min(own_score() + 500, 1000)
        assert refused == [f"/proc/{pid}/oom_score_adj"] * times


def test_a_command_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refuse(monkeypatch, 1_000_000)
    wait = os.waitid
    monkeypatch.setattr(os, "waitid", lambda kind, pid, how: wait(kind, pid, os.WEXITED | os.WNOWAIT))
    request: Header = {"argv": ["true"], "env": [["PATH", os.defpath]], "cwd": "/", "user": None}
    pid = spawn(request, Stdio())
    assert refused == [f"/proc/{pid}/oom_score_adj"]
    assert os.waitpid(pid, 0)[1] == 0


def test_a_program_that_is_never_dumpable_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refuse(monkeypatch, 1_000_000)
    begun = time.monotonic()
    with sleeping() as pid:
        assert time.monotonic() - begun < 10
        assert score_of(pid) == own_score()
        assert len(refused) > 1


def test_a_command_is_preferred_where_the_worker_has_a_score_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod: Kubernetes gives the processes of most pods scores from 2 to 1000."""
    for ours, its in ((700, 1000), (1000, 1000)):
        monkeypatch.setattr(module, "_own_score", lambda ours=ours: ours)
        with sleeping() as pid:
            assert score_of(pid) == its
