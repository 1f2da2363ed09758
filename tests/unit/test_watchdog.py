"""What the watchdog looks at, and what it leaves: tables of processes as /proc has them, in directories of ours."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from minisandbox.launch import init, setup, watchdog
from minisandbox.launch.kernel.ledger import Ledger
from minisandbox.launch.tracing import Tracing

KB = 1024


def process(place: Path, *, own: int = 0, common: int = 0, share: int | None = None) -> str:
    """A process that shows so many KB in its table, and so many as its share of them; None: it does not show that."""
    (place / "fd").mkdir(parents=True)
    (place / "status").write_text(f"RssAnon:\t{own} kB\nRssFile:\t9 kB\nRssShmem:\t{common} kB\nVmSwap:\t0 kB\n")
    if share is not None:
        anonymous, shared = (share, 0) if own else (0, share)
        table = f"Rss: 9 kB\nPss: 9 kB\nPss_Anon: {anonymous} kB\nPss_Shmem: {shared} kB\n"
        (place / "smaps_rollup").write_text(f"{table}Anonymous: {own} kB\nSwapPss: 0 kB\n")
    return str(place)


def test_what_processes_share_counts_once(tmp_path: Path) -> None:
    places = [process(tmp_path / str(number), own=400, share=100) for number in range(4)]
    assert watchdog._held(places, 500 * KB) == 400 * KB


def test_who_does_not_show_its_share_counts_as_a_whole(tmp_path: Path) -> None:
    places = [process(tmp_path / "1", own=400, share=100), process(tmp_path / "2", own=400)]
    assert watchdog._held(places, 600 * KB) == 500 * KB


def test_nobody_is_looked_at_who_decides_nothing(tmp_path: Path) -> None:
    """A process with areas without number takes as long as it likes to be looked at, and holds little."""
    large = process(tmp_path / "large", common=900, share=900)
    many = [process(tmp_path / str(number), own=10, share=1) for number in range(20)]
    assert watchdog._held([*many, large], 500 * KB) == (900 + 20 * 10) * KB, "too much before the small ones"
    assert watchdog._held([*many, large], 1200 * KB) == (900 + 20 * 10) * KB, "little enough, whatever they share"


def test_who_keeps_it_looking_counts_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [process(tmp_path / str(number), own=400, share=100) for number in range(4)]
    monkeypatch.setattr(watchdog, "_LONGEST_LOOK", -1.0)
    assert watchdog._held(places, 500 * KB) == 1600 * KB


def test_looks_are_no_more_frequent_than_they_are_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pid 1 has something to do at each end of a process; a look at 200 of them takes 5 ms."""
    looks: list[object] = []
    monkeypatch.setattr(watchdog, "enforce", lambda *_: looks.append(time.monotonic()))
    numbers = {setup.LIFETIME: 0, setup.MEMORY: 1}
    control, other = socket.socketpair()
    with control, other:
        first = init.Init(control, other, numbers, Ledger(None), Tracing(-1))
        signal.set_wakeup_fd(-1)
        end = time.monotonic() + 3 * watchdog.INTERVAL
        while time.monotonic() < end:
            first._watch_memory()
    assert 1 <= len(looks) <= 4
    assert [watchdog.pause_after(cost) for cost in (0.001, 0.005, 0.1)] == [0.05, 0.1, 0.2]


def test_who_has_ended_since_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table was read with the others', and when its share is asked for it is a zombie."""
    places = [process(tmp_path / "1", own=400, share=200), process(tmp_path / "2", own=300)]
    tables = iter([(400 * KB, 0), (300 * KB, 0), (0, 0)])
    monkeypatch.setattr(watchdog, "_whole", lambda place: next(tables))
    assert watchdog._held(places, 450 * KB) == 200 * KB
