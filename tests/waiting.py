"""Waiting for what comes true by itself, and whether a process is there: one place for both.

Nothing sleeps to be lucky: a test asks until it is so. Patience is for a machine that is slow and busy, and costs
nothing where it is not needed. Where the first process reaps no orphans, an ended process keeps its /proc/PID for
ever: only its state tells (``tests/without_reaper.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 60.0  # seconds
PAUSE = 0.02


def until(condition: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Ask until the answer is true; return it.

    Raises:
        AssertionError: it was not so in time.
    """
    give_up = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < give_up, f"not so after {seconds:.0f} s"
        time.sleep(PAUSE)
    return answer


def settled(look: Callable[[], T], seconds: float = 0.5) -> T:
    """What is there once it has not changed for a while: for what ends by itself and tells nobody."""
    last, since = look(), time.monotonic()

    def is_steady() -> bool:
        nonlocal last, since
        now = look()
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= seconds

    until(is_steady)
    return last


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on (proc_pid_stat(5)), or None for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """When a running process started, in ticks since boot; None for one that does not run.

    One whose first thread has ended shows as a zombie too, and runs on in its other threads.
    """
    fields = stat_fields(pid)
    if fields is None or (fields[0] in "ZX" and not _has_threads(pid)):
        return None
    return int(fields[19])


def _has_threads(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def running(pid: int) -> bool:
    """Whether a process is there and no mere zombie."""
    return start_time(pid) is not None


def running_with(words: bytes) -> list[int]:
    """Running processes whose command line has ``words`` in it; arguments are separated by null bytes."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:  # gone meanwhile
            continue
        if words in command and running(int(name)):
            found.append(int(name))
    return found


def locked_bytes(path: Path) -> int:
    """How many bytes of a file are locked, by anybody (proc_locks(5)); 0 where it is not there."""
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return 0
    rows = (line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    spans = [(row[-2], row[-1]) for row in rows if row[-3].rpartition(":")[2] == str(inode)]
    return sum(int(end) - int(start) + 1 for start, end in spans)
