"""Measure what the system-call filter costs: to load, and for what runs under it.

    python benchmarks/bench_seccomp.py [--quick]

Every pair is measured with and without the filter in turn, in fresh processes; what is printed are minima and their
ratio, which a loaded machine disturbs least. The kernel answers calls that are allowed whatever their arguments from a
bitmap (since Linux 5.11); only the others run the program.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

from minisandbox.launch.kernel import seccomp, syscalls

CALLS = 5_000
MEASURES: dict[str, tuple[str, Callable[[], object]]] = {
    "getppid": ("allowed always", os.getppid),
    "setpriority": ("allowed by its arguments", lambda: os.setpriority(os.PRIO_PGRP, 0, 19)),
    "read": ("allowed always", lambda: os.pread(0, 4096, 0)),
}
PROGRAMS: dict[str, list[str]] = {
    "python -c pass": [sys.executable, "-I", "-c", "pass"],
    "python -c 'import asyncio'": [sys.executable, "-I", "-c", "import asyncio"],
    "bash, 50 programs": ["bash", "-c", "for i in {1..50}; do /bin/true; done"],
    "find /usr/include": ["find", "/usr/include"],
}


def main() -> None:
    """Print a table, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the repetitions")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--filter", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.inside:
        run_inside(options.inside, rest, filtered=options.filter)
        return
    report(2 if options.quick else 10)


def report(repeat: int) -> None:
    """Measure everything and print it."""
    cores = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"{cores}, Python {platform.python_version()}, load {os.getloadavg()[0]:.2f}")
    started = time.perf_counter()
    size = len(seccomp.assemble()) // 8
    print(f"assembling, once per launcher: {(time.perf_counter() - started) * 1e3:.2f} ms, {size} instructions")
    loading = min(float(inside("load", [], filtered=False)) for _ in range(repeat))
    print(f"loading, in each process that does: {loading * 1e6:.0f} us")
    for name, (kind, _) in MEASURES.items():
        show(f"{name} ({kind}), ns", 1e9, repeat, "calls", [name])
    for name, command in PROGRAMS.items():
        show(f"{name}, ms", 1e3, repeat, "program", command)


def show(what: str, scale: float, repeat: int, kind: str, rest: list[str]) -> None:
    """Measure in turn and print a line."""
    pairs = [[float(inside(kind, rest, filtered=on)) for on in (False, True)] for _ in range(repeat)]
    without, with_filter = (min(column) * scale for column in zip(*pairs, strict=True))
    print(
        f"{what:<45} without {without:9.2f}   with {with_filter:9.2f}   ratio {with_filter / without:.3f}", flush=True
    )


def inside(kind: str, rest: list[str], *, filtered: bool) -> str:
    """Run a measurement in a process of its own."""
    command = [sys.executable, __file__, "--inside", kind, *(["--filter"] if filtered else []), *rest]
    with open(sys.executable, "rb") as some_file:
        return subprocess.run(command, stdin=some_file, capture_output=True, text=True, check=True).stdout


def run_inside(kind: str, rest: list[str], *, filtered: bool) -> None:
    """Measure one thing and print its seconds."""
    seccomp.assemble()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if filtered:
        seccomp.install()
    if kind == "load":
        print(fastest(seccomp.install, 1, 1))
    elif kind == "calls":
        print(fastest(MEASURES[rest[0]][1], 40, CALLS))
    else:
        quiet = subprocess.DEVNULL
        print(fastest(lambda: subprocess.run(rest, stdin=quiet, stdout=quiet, check=True), 5, 1))


def fastest(call: Callable[[], object], rounds: int, count: int) -> float:
    """Seconds that a call takes, in the fastest of some rounds of ``count`` calls."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - started) / count)
    return best


if __name__ == "__main__":
    main()
