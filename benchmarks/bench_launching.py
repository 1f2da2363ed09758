"""Measure what a sandbox costs: creation, exec, teardown, memory, many at once; beside the alternatives found here.

    python benchmarks/bench_launching.py [--quick] [--json FILE] [--beside DIR]

Every number is printed with the machine's load; ratios are to alternatives measured in the same run, interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

MB = 1_000_000


def main() -> None:
    """Run every measurement and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--beside", type=Path, help="src directory of another version: only creation, in alternation")
    options = parser.parse_args()
    repeat = 10 if options.quick else 100
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, uid {os.geteuid()}, load {os.getloadavg()[0]:.2f}")
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        measured = versions(options.beside, repeat) if options.beside else measure(Path(directory), repeat)
        for name, value in measured:
            results[name] = value
            print(f"{name:<72} {value:10.3f}   load {os.getloadavg()[0]:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(directory: Path, repeat: int) -> Iterator[tuple[str, float]]:
    """Yield (what, value) pairs: milliseconds, megabytes or ratios, as the name says."""
    spec = base_image(directory)
    Sandbox.create(spec).stop()
    yield from creation(spec, directory, repeat)
    yield from image_sizes(spec, directory, repeat)
    yield from live_sandboxes(spec, repeat)
    yield from round_trips(spec, repeat)
    yield from at_once(spec, 64)
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


def first_result(spec: ImageSpec) -> tuple[float, float]:
    """Milliseconds from create() to the first command's result, and of stop()."""
    start = time.perf_counter()
    box = Sandbox.create(spec)
    assert box.exec(["/bin/true"]).ok
    middle = time.perf_counter()
    box.stop()
    return (middle - start) * 1000, (time.perf_counter() - middle) * 1000


def creation(spec: ImageSpec, directory: Path, repeat: int) -> Iterator[tuple[str, float]]:
    """Our creation beside bubblewrap's and the unpacking of a cached environment, interleaved."""
    alternatives = dict(other_ways(spec, directory))
    ours: list[float] = []
    stops: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in alternatives}
    cpu = -cpu_seconds()
    for _ in range(repeat):
        created, stopped = first_result(spec)
        ours.append(created)
        stops.append(stopped)
    cpu += cpu_seconds()
    for _ in range(max(5, repeat // 10)):
        first_result(spec)
        for name, way in alternatives.items():
            theirs[name].append(timed(way))
    yield "create to first result, ms, median", statistics.median(ours)
    yield "create to first result, ms, 99th percentile", statistics.quantiles(ours, n=100)[98]
    yield "stop, ms, median", statistics.median(stops)
    yield "CPU of create + command + stop, ms", cpu / repeat * 1000
    for name, times in theirs.items():
        yield f"{name}, ms, median", statistics.median(times)
        yield f"ratio of ours to {name}", statistics.median(ours) / statistics.median(times)


def cpu_seconds() -> float:
    """CPU of this process and of everything it started, the launcher's children included."""
    ticks = 0
    for pid in (os.getpid(), *descendants()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def other_ways(spec: ImageSpec, directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways that others go: an archive unpacked for each workspace, and bubblewrap where it is installed."""
    archive = directory / "environment.tar.gz"
    fill(directory / "environment", 25, files=1500)
    with tarfile.open(archive, "w:gz", compresslevel=6) as out:
        out.add(directory / "environment", "environment")

    def unpack() -> None:
        with tempfile.TemporaryDirectory(dir=directory) as target:
            subprocess.run(["tar", "-xzf", archive, "-C", target], check=True)

    yield "unpacking and removing a 25 MB environment", unpack
    bwrap = shutil.which("bwrap")
    if bwrap:
        root = str(spec.layers[0])
        command = [bwrap, "--unshare-all", "--ro-bind", root, "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc",
                   "--dev", "/dev", "--tmpfs", "/tmp", "/bin/true"]  # fmt: skip
        yield "bubblewrap, one command", lambda: subprocess.run(command, check=True)


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
            times[megabytes].append(first_result(image)[0])
    for megabytes, values in times.items():
        yield f"create to first result, image of {megabytes} MB, ms, median", statistics.median(values)
    yield "ratio of 2 GB to 10 MB", statistics.median(times[2000]) / statistics.median(times[10])


def live_sandboxes(spec: ImageSpec, repeat: int) -> Iterator[tuple[str, float]]:
    """Creation beside 1 and beside 200 live sandboxes, and what an idle one takes."""
    with ExitStack() as stack:
        stack.enter_context(Sandbox.create(spec))
        one = statistics.median(first_result(spec)[0] for _ in range(repeat))
        before = used_memory()
        for _ in range(199):
            stack.enter_context(Sandbox.create(spec)).exec(["/bin/true"])
        time.sleep(2)  # idle is what is measured
        each = (used_memory() - before) / 199 / MB
        many = statistics.median(first_result(spec)[0] for _ in range(repeat))
        stack.pop_all().close()
        stack.enter_context(Sandbox.create(spec))
        again = statistics.median(first_result(spec)[0] for _ in range(repeat))
    one = (one + again) / 2  # before and after: the machine's own drift falls out
    yield "create to first result beside 1 live sandbox, ms, median", one
    yield "create to first result beside 200 live sandboxes, ms, median", many
    yield "ratio of 200 to 1", many / one
    if os.geteuid() == 0:  # nobody else may read what the processes of a sandbox take: they are not dumpable
        yield "memory of an idle sandbox (PSS and kernel objects, mean of 199), MB", each


def used_memory() -> int:
    """Bytes of this process's sandboxes: their processes' proportional share, and the kernel's own objects.

    MemAvailable would also count what other programs do meanwhile.
    """
    total = 0
    for pid in descendants():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kernel = {"Slab:", "KernelStack:", "PageTables:", "Percpu:", "Shmem:"}
    return total + sum(int(fields[1]) * 1024 for fields in lines if fields[0] in kernel)


def descendants() -> Iterator[int]:
    """Every process that this one started, and theirs."""
    queue = [os.getpid()]
    while queue:
        pid = queue.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                below = [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
                yield from below
                queue += below
        except OSError:
            continue


def round_trips(spec: ImageSpec, repeat: int) -> Iterator[tuple[str, float]]:
    """Commands and file verbs in a sandbox that is there."""
    with Sandbox.create(spec) as box:
        for _ in range(5):
            box.exec(["/bin/true"])
        actions: dict[str, Callable[[], object]] = {
            "exec of /bin/true": lambda: box.exec(["/bin/true"]),
            "exec of a shell command": lambda: box.exec("true"),
            "subprocess.run of /bin/true on the host": lambda: subprocess.run(["/bin/true"], check=True),
            "write of a file of 10 kB": lambda: box.files.write_bytes("/tmp/x", b"x" * 10_000),
            "read of a file of 10 kB": lambda: box.files.read_bytes("/tmp/x"),
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(repeat * 2):
            for name, action in actions.items():
                times[name].append(timed(action))
    for name, values in times.items():
        yield f"{name}, ms, median", statistics.median(values)


def at_once(spec: ImageSpec, count: int) -> Iterator[tuple[str, float]]:
    """So many sandboxes asked for at the same moment, until each has run a command."""
    boxes: list[Sandbox] = []

    def make() -> None:
        box = Sandbox.create(spec)
        box.exec(["/bin/true"])
        boxes.append(box)

    threads = [threading.Thread(target=make) for _ in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    middle = time.perf_counter()
    yield f"{count} at once until all have run a command, ms", (middle - start) * 1000
    for box in boxes:
        box.stop()
    yield f"stopping {count}, ms", (time.perf_counter() - middle) * 1000


def import_time() -> float:
    """What ``import minisandbox`` adds to an interpreter's start."""

    def least(code: str) -> float:
        return min(timed(lambda: subprocess.run([sys.executable, "-c", code], check=True)) for _ in range(20))

    return least("import minisandbox") - least("pass")


if __name__ == "__main__":
    main()
