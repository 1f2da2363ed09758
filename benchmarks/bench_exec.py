"""Measure a command in a running sandbox next to the host's subprocess.run.

    python benchmarks/bench_exec.py [--beside DIR] [--blocks N] [--realtime]

Blocks of 20 commands alternate between the host, this version and, with --beside, another version's src. Every ratio is
the median over the blocks. --realtime gives all processes of the measurement the real-time class (as root), so that
other work delays none of them: a busy machine then shows nearly the times of a quiet one.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
BLOCK = 20
COMMAND = ["/bin/true"]
CGROUPS = Path("/sys/fs/cgroup/cpu")
_SHARE = 400_000  # microseconds of each second that a group's real-time processes may run

_VERSION = """
import pathlib, sys, tempfile, time
from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec
with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as directory:
    tree = pathlib.Path(directory, "base")
    write_base(base_entries(), tree)
    with Sandbox.create(ImageSpec("base", (tree,))) as box:
        first = int(box.exec("echo $$").stdout)
        for line in sys.stdin:
            if not line.strip():
                print(int(box.exec("echo $$").stdout) - first, flush=True)
                continue
            times = []
            for _ in range(int(line)):
                start = time.perf_counter()
                assert box.exec(["/bin/true"]).ok
                times.append((time.perf_counter() - start) * 1e6)
            print(*times, flush=True)
"""


class Version:
    """A process with a sandbox of one version."""

    def __init__(self, source: Path, stack: ExitStack) -> None:
        self.commands = 0
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _VERSION], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(source)},
            )
        )  # fmt: skip

    def block(self, count: int = BLOCK) -> list[float]:
        """Return the microseconds of each of some commands."""
        self.commands += count
        return [float(number) for number in self._ask(str(count)).split()]

    def processes_per_command(self) -> float:
        """Return how many process ids the sandbox used for each command; more than 1 if it forked extra workers."""
        return int(self._ask("")) / (self.commands + 1)

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def host_block() -> list[float]:
    """Return the microseconds of each of some commands on the host."""
    times = []
    for _ in range(BLOCK):
        start = time.perf_counter()
        subprocess.run(COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def make_realtime(pid: int) -> None:
    """Give a process and its descendants the real-time class.

    With control groups of version 1, each group first needs a share of real-time processing.
    """
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children.setdefault(int((directory / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(directory.name)
            )
    queue = [pid]
    while queue:
        process = queue.pop()
        queue += children.get(process, [])
        with suppress(ProcessLookupError, FileNotFoundError):
            _allow_realtime(process)
            os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(1))


def _allow_realtime(pid: int) -> None:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "cpu" and path != "/":
            group = CGROUPS / path[1:]
            for directory in (*reversed([parent for parent in group.parents if parent.is_relative_to(CGROUPS)]), group):
                share = directory / "cpu.rt_runtime_us"
                if directory != CGROUPS and share.exists() and int(share.read_text()) <= 0:
                    share.write_text(str(_SHARE))


def main() -> None:
    """Measure, and print a line for each version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, metavar="DIR", help="src directory of another version")
    parser.add_argument("--blocks", type=int, default=25, metavar="N", help="blocks of 20 commands (default: 25)")
    parser.add_argument("--realtime", action="store_true", help="use the real-time class; needs root")
    options = parser.parse_args()
    sources = {"this version": SOURCE, **({"the other version": options.beside.resolve()} if options.beside else {})}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load()}")
    with ExitStack() as stack:
        versions = {name: Version(source, stack) for name, source in sources.items()}
        for version in versions.values():
            version.block()
        if options.realtime:
            make_realtime(os.getpid())
        host: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in versions}
        ratios: dict[str, list[float]] = {name: [] for name in versions}
        for _ in range(options.blocks):
            host += (block := host_block())
            for name, version in versions.items():
                times[name] += (inside := version.block())
                ratios[name].append(statistics.median(inside) / statistics.median(block))
        print(f"host: {statistics.median(host):.0f} us")
        for name, version in versions.items():
            print(
                f"{name}: {statistics.median(times[name]):.0f} us, {statistics.median(ratios[name]):.2f} of the host's"
                f" time, {version.processes_per_command():.2f} processes a command; load {load()}"
            )
        for version in versions.values():
            assert version.process.stdin is not None
            version.process.stdin.close()


def load() -> str:
    """Return the load average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
