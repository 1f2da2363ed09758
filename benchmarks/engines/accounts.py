"""Control groups that count what an engine takes: CPU time, memory, and every process of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OLD = _ROOT / "cpuacct"
_PATIENCE = 30.0  # seconds for killed processes to end


class Account:
    """The processes of one engine: its controller's, its daemons', those in its sandboxes.

    Args:
        name: the group's name, relative to the root of a controller.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._version = 1 if (_OLD / "cpuacct.usage").exists() else 2
        self._path = (_OLD if self._version == 1 else _ROOT) / name

    def enter(self, pid: int) -> bool:
        """Count a process and its future children; return whether this user may make groups."""
        try:
            # a group of version 2 that gives controllers to groups below has no processes itself
            (self._path / "controller").mkdir(parents=True, exist_ok=True)
            (self._path / "controller" / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        return True

    def cpu(self) -> float:
        """Return the CPU seconds so far, those of ended processes included."""
        if self._version == 1:
            return int((self._path / "cpuacct.usage").read_text()) / 1e9
        return int((self._path / "cpu.stat").read_text().split()[1]) / 1e6

    def memory(self) -> int:
        """Return the proportional set size of all processes in bytes."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):  # it ended meanwhile
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return total

    def pids(self) -> set[int]:
        """Return the live processes."""
        found: set[int] = set()
        for file in self._path.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(map(int, file.read_text().split()))
        return found

    def remove(self) -> None:
        """Kill every process, and remove the groups of all controllers."""
        deadline = time.monotonic() + _PATIENCE
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for top in (_ROOT / self._name, *_ROOT.glob(f"*/{self._name}")):
            for directory, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)


def accounts_of(prefix: str) -> list[Account]:
    """Return the accounts whose names start with a prefix."""
    names = {path.name for pattern in (f"{prefix}*", f"*/{prefix}*") for path in _ROOT.glob(pattern)}
    return [Account(name) for name in sorted(names)]
