"""Measure what the states of a workspace cost: snapshot, fork, reset, changes; beside copying what was written.

    python benchmarks/bench_workspaces.py [--quick] [--json FILE]

Every number is printed with the machine's load; the alternative, a copy of the same files by ``cp -a``, is measured in
the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits

MB = 1_000_000


def main() -> None:
    """Run every measurement and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the forks")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, uid {os.geteuid()}, load {os.getloadavg()[0]:.2f}")
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        for name, value in measure(Path(directory), 100 if options.quick else 1000):
            results[name] = value
            print(f"{name:<72} {value:10.3f}   load {os.getloadavg()[0]:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(directory: Path, forks: int) -> Iterator[tuple[str, float]]:
    """Yield (what, value) pairs: milliseconds, megabytes or ratios, as the name says."""
    tree = directory / "base"
    write_base(base_entries(), tree)
    spec = ImageSpec("base", (tree,))
    yield from snapshots(spec)
    yield from many_forks(spec, forks)
    copied = copying(directory)
    yield "cp -a of 300 MB in 3,000 files, ms", copied


def fill(box: Sandbox) -> None:
    """Write 300 MB in 3,000 files."""
    script = (
        "mkdir /testbed/d; head -c 100000 /dev/urandom > /tmp/piece;"
        "for i in $(seq 3000); do cp /tmp/piece /testbed/d/$i; done"
    )
    box.exec(script).check()


def snapshots(spec: ImageSpec) -> Iterator[tuple[str, float]]:
    """Seal an empty workspace and a full one: the cost must not depend on what was written."""
    limits = Limits(disk="1G")
    with Sandbox.create(spec, limits=limits) as empty, Sandbox.create(spec, limits=limits) as full:
        fill(full)
        times = {box: [timed(box.snapshot) for _ in range(30)] for box in (empty, full)}
        yield "snapshot of an unchanged workspace, ms, median", statistics.median(times[empty])
        yield "snapshot of one over 300 MB of changes, ms, median", statistics.median(times[full])
    firsts = []
    for _ in range(5):
        with Sandbox.create(spec, limits=limits) as full:
            fill(full)
            firsts.append(timed(full.snapshot))
    yield "first snapshot of 300 MB of changes, ms, median", statistics.median(firsts)


def many_forks(spec: ImageSpec, count: int) -> Iterator[tuple[str, float]]:
    """Fork a workspace with 300 MB of changes many times, and see what that adds to memory."""
    with Sandbox.create(spec, limits=Limits(disk="1G")) as box:
        fill(box)
        yield "changes of 3,000 files, ms", timed(box.changes)
        shared, free = meminfo("Shmem"), meminfo("MemAvailable")
        started = time.perf_counter()
        kids = box.fork(count)
        each = (time.perf_counter() - started) / count * 1000
        yield f"fork, ms each of {count}", each
        yield "tmpfs memory that the forks added, MB", (meminfo("Shmem") - shared) / MB
        yield "memory of each fork, MB", (free - meminfo("MemAvailable")) / MB / count
        sizes = {kid.exec("du -sk /testbed/d | cut -f1; echo $RANDOM > /testbed/d/1").stdout for kid in kids[:8]}
        assert len(sizes) == 1, sizes
        yield "fork to its first result, ms, beside the others live", first_result(box)
        yield "reset, ms, median", statistics.median(timed(box.reset) for _ in range(20))
        yield "stop, ms each", sum(timed(kid.stop) for kid in kids) / count


def first_result(box: Sandbox) -> float:
    """Milliseconds from fork() to the result of a command in the fork."""
    started = time.perf_counter()
    (kid,) = box.fork(1)
    with kid:
        assert kid.exec(["/bin/true"]).ok
        return (time.perf_counter() - started) * 1000


def copying(directory: Path) -> float:
    """Milliseconds of a plain copy of as many files."""
    source = directory / "source"
    source.mkdir()
    piece = os.urandom(100_000)
    for number in range(3000):
        (source / str(number)).write_bytes(piece)
    return timed(lambda: subprocess.run(["cp", "-a", source, directory / "copy"], check=True))


def timed(action: Callable[[], object]) -> float:
    """Milliseconds that an action takes."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1000


def meminfo(name: str) -> int:
    """Bytes, as /proc/meminfo says."""
    with open("/proc/meminfo", encoding="ascii") as table:
        return next(int(line.split()[1]) * 1024 for line in table if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
