"""Measure what creation depends on: the image's size, live sandboxes; file operations; memory; another version.

`make bench-engines` compares creation, commands, memory and many at once with other engines.

    python benchmarks/bench_launching.py [--quick] [--json FILE] [--memory | --beside DIR]

Every number is printed with the machine's load; ratios are of measurements in alternation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

MB = 1_000_000
IDLE = (50, 500, 1000, 2000)
"""Numbers of idle sandboxes whose memory is measured."""


def main() -> None:
    """Run every measurement and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--beside", type=Path, help="src directory of another version: only creation, in alternation")
    parser.add_argument("--memory", action="store_true", help="only the memory of up to 2,000 idle sandboxes")
    options = parser.parse_args()
    repeat = 10 if options.quick else 100
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, uid {os.geteuid()}, load {os.getloadavg()[0]:.2f}")
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        if options.beside:
            measured = versions(options.beside, repeat)
        elif options.memory:
            measured = idle_memory(base_image(Path(directory)), [count // (100 // repeat) for count in IDLE])
        else:
            measured = measure(Path(directory), repeat)
        for name, value in measured:
            results[name] = value
            print(f"{name:<72} {value:10.3f}   load {os.getloadavg()[0]:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(directory: Path, repeat: int) -> Iterator[tuple[str, float]]:
    """Yield (what, value) pairs: milliseconds, megabytes or ratios, as the name says."""
    spec = base_image(directory)
    Sandbox.create(spec).stop()
    yield from image_sizes(spec, directory, repeat)
    yield from live_sandboxes(spec, repeat)
    yield from file_operations(spec, repeat)
    yield "import minisandbox over bare Python, ms (minimum of 20)", import_time()


_VERSION = """
import pathlib, sys, tempfile, time
from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec
with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as directory:
    tree = pathlib.Path(directory, "base")
    write_base(base_entries(), tree)
    spec = ImageSpec("base", (tree,))
    Sandbox.create(spec).stop()
    for _ in sys.stdin:
        start = time.perf_counter()
        box = Sandbox.create(spec)
        created = time.perf_counter()
        assert box.exec(["/bin/true"]).ok
        print((created - start) * 1000, (time.perf_counter() - start) * 1000, flush=True)
        box.stop()
"""


def versions(other: Path, repeat: int) -> Iterator[tuple[str, float]]:
    """Creation by this version and by another one, each in a process of its own, alternately."""
    times: dict[str, list[tuple[float, float]]] = {"this": [], "other": []}
    with ExitStack() as stack:
        processes = {}
        for name, source in (("this", Path(__file__).resolve().parents[1] / "src"), ("other", other.resolve())):
            processes[name] = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _VERSION], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": str(source)},
                )
            )  # fmt: skip
        for _ in range(repeat):
            for name, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                created, first = map(float, process.stdout.readline().split())
                times[name].append((created, first))
    for number, what in enumerate(("create", "create to first result")):
        this, that = (statistics.median(pair[number] for pair in times[name]) for name in ("this", "other"))
        yield f"{what}, this version, ms, median", this
        yield f"{what}, the other version, ms, median", that
        yield f"{what}: this minus the other, ms", this - that
        yield f"{what}: ratio of this to the other", this / that


def base_image(directory: Path) -> ImageSpec:
    """Make the smallest image."""
    tree = directory / "base"
    write_base(base_entries(), tree)
    return ImageSpec("base", (tree,))


def timed(action: Callable[[], object]) -> float:
    """Milliseconds that an action takes."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1000


def first_result(spec: ImageSpec) -> float:
    """Milliseconds from create() to the first command's result."""
    start = time.perf_counter()
    box = Sandbox.create(spec)
    assert box.exec(["/bin/true"]).ok
    milliseconds = (time.perf_counter() - start) * 1000
    box.stop()
    return milliseconds


def fill(tree: Path, megabytes: int, files: int) -> None:
    """Write a tree of ``files`` files with ``megabytes`` in all."""
    size = megabytes * MB // files
    for number in range(files):
        path = tree / f"{number % 50}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size // 2) + bytes(size - size // 2))


def image_sizes(spec: ImageSpec, directory: Path, repeat: int) -> Iterator[tuple[str, float]]:
    """Creation over images of 10 MB and of 2 GB, interleaved."""
    images = {}
    for megabytes, files in ((10, 500), (2000, 20000)):
        tree = directory / f"image-{megabytes}"
        fill(tree / "opt" / "content", megabytes, files)
        images[megabytes] = ImageSpec(f"{megabytes}", (*spec.layers, tree))
    times: dict[int, list[float]] = {megabytes: [] for megabytes in images}
    for _ in range(repeat):
        for megabytes, image in images.items():
            times[megabytes].append(first_result(image))
    for megabytes, values in times.items():
        yield f"create to first result, image of {megabytes} MB, ms, median", statistics.median(values)
    yield "ratio of 2 GB to 10 MB", statistics.median(times[2000]) / statistics.median(times[10])


def live_sandboxes(spec: ImageSpec, repeat: int) -> Iterator[tuple[str, float]]:
    """Creation beside 1 and beside 200 live sandboxes."""
    with ExitStack() as stack:
        stack.enter_context(Sandbox.create(spec))
        one = statistics.median(first_result(spec) for _ in range(repeat))
        for _ in range(199):
            stack.enter_context(Sandbox.create(spec)).exec(["/bin/true"])
        many = statistics.median(first_result(spec) for _ in range(repeat))
        stack.pop_all().close()
        stack.enter_context(Sandbox.create(spec))
        again = statistics.median(first_result(spec) for _ in range(repeat))
    one = (one + again) / 2  # before and after: the machine's own drift falls out
    yield "create to first result beside 1 live sandbox, ms, median", one
    yield "create to first result beside 200 live sandboxes, ms, median", many
    yield "ratio of 200 to 1", many / one


def idle_memory(spec: ImageSpec, counts: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Memory of idle sandboxes that have run one command.

    It is the proportional set size of all processes below this one, spares and the launcher included, and what the
    kernel's objects and page tables take beyond that, by /proc/meminfo.
    """
    kernel = kernel_memory()
    with ExitStack() as stack:
        live = before = 0
        for count in counts:
            for _ in range(count - live):
                stack.enter_context(Sandbox.create(spec)).exec(["/bin/true"])
            time.sleep(3)  # workers that are not used end
            memory = sum(map(proportional, descendants(os.getpid())))
            yield f"memory of each of {count} idle sandboxes, MB", memory / count / MB
            if live:
                yield f"of each from the {live + 1}th to the {count}th", (memory - before) / (count - live) / MB
            yield f"kernel memory of each of {count}", (kernel_memory() - kernel) / count / MB
            live, before = count, memory


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below a process."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


def proportional(pid: int) -> int:
    """Return a process's proportional set size in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def kernel_memory() -> int:
    """Return the bytes of the kernel's objects, page tables and stacks."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sum(fields[name] for name in ("Slab", "PageTables", "KernelStack", "Percpu"))


def file_operations(spec: ImageSpec, repeat: int) -> Iterator[tuple[str, float]]:
    """Write and read a file in a running sandbox."""
    with Sandbox.create(spec) as box:
        actions: dict[str, Callable[[], object]] = {
            "write of a file of 10 kB": lambda: box.files.write_bytes("/tmp/x", b"x" * 10_000),
            "read of a file of 10 kB": lambda: box.files.read_bytes("/tmp/x"),
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(repeat * 2):
            for name, action in actions.items():
                times[name].append(timed(action))
    for name, values in times.items():
        yield f"{name}, ms, median", statistics.median(values)


def import_time() -> float:
    """What ``import minisandbox`` adds to an interpreter's start."""

    def least(code: str) -> float:
        return min(timed(lambda: subprocess.run([sys.executable, "-c", code], check=True)) for _ in range(20))

    return least("import minisandbox") - least("pass")


if __name__ == "__main__":
    main()
