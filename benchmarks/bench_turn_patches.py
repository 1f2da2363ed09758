"""Measure what a patch after each turn costs, on a real repository, against turns without one and with git's.

    python benchmarks/bench_turn_patches.py --repository DIRECTORY [--turns N] [--json FILE]

The commands are an agent's usual ones: most read, some edit, some create files. Three sandboxes take each turn after
one another, in a rotating order: without a patch, with the tracker's, with ``Sandbox.patch``. CPU time is that of this
process and its descendants. At the end git applies the tracker's patch, which must give the tree of git's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path, PurePosixPath

from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import AsyncSandbox
from minisandbox.sandbox.tracking import track_changes
from minisandbox.types import ImageSpec

READ, EDIT, RUN = 12, 5, 3  # of 20 turns
WAYS = ("none", "tracker", "git")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path, required=True, help="a git repository with Python files")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, uid {os.geteuid()}, load {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as directory:
        spec, files = image_of(options.repository, Path(directory))
        print(f"{options.repository.name}: {len(files)} Python files, {options.turns} turns")
        results = asyncio.run(measure(spec, files, options.turns))
    for name, value in results.items():
        print(f"{name:<60} {value:9.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def image_of(repository: Path, directory: Path) -> tuple[ImageSpec, list[str]]:
    """Return an image with a checkout of the repository, and the paths of its Python files."""
    base, layer = directory / "base", directory / "layer"
    write_base(base_entries(), base)
    clone = ["git", "clone", "-q", "--no-hardlinks", str(repository), str(layer / "testbed")]
    subprocess.run(clone, check=True)
    git = ["git", "-C", str(layer / "testbed")]
    files = subprocess.run([*git, "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout.split()
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    return ImageSpec("bench", (base, layer), workdir=PurePosixPath("/testbed"), base_commit=commit, clean=True), files


def script_of(turn: int, files: list[str]) -> str:
    """Return the command of a turn."""
    draw = random.Random(turn)
    path = draw.choice(files)
    kind = draw.choices(("read", "edit", "run"), (READ, EDIT, RUN))[0]
    if kind == "read":
        return f"grep -n import {path} | head; sed -n 1,80p {path}"
    if kind == "edit":
        line = draw.randrange(1, 40)
        return f"sed -i '{line}s/^/# {turn}: /' {path}; sed -i '$a # end {turn}' {path}"
    return f"echo 'x = {turn}' > new_{turn}.py; python3 -m compileall -q {Path(path).parent} > /dev/null; true"


async def measure(spec: ImageSpec, files: list[str], turns: int) -> dict[str, float]:
    """Return milliseconds per turn and way."""
    boxes = {way: await AsyncSandbox.create(spec) for way in WAYS}
    tracker = track_changes(boxes["tracker"])
    assert tracker is not None
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    last = b""
    try:
        for turn in range(turns):
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                (await boxes[way].exec(script_of(turn, files))).check()
                await asyncio.sleep(0.1)  # a model takes longer
                children = children_of(os.getpid())
                began, used = time.perf_counter(), time.process_time()
                if way == "tracker":
                    last = await tracker.patch()
                elif way == "git":
                    await boxes[way].patch()
                wall[way].append(time.perf_counter() - began)
                used = time.process_time() - used
                cpu[way].append(used + children_of(os.getpid()) - children)
        check(spec, last, await boxes["git"].patch())
    finally:
        await tracker.close()
        for box in boxes.values():
            await box.stop()
    return {
        f"{way}: {what} per turn, ms, {name}": function(values[way]) * 1000
        for way in WAYS
        for what, values in (("wall time", wall), ("CPU time", cpu))
        for name, function in (("mean", statistics.fmean), ("median", statistics.median), ("largest", max))
    } | {"size of the last patch, KiB": len(last) / 1024}


def children_of(pid: int) -> float:
    """Return the CPU time of a process's descendants, the reaped ones included."""
    total, waiting = 0.0, [pid]
    tick = os.sysconf("SC_CLK_TCK")
    parents: dict[int, list[tuple[int, float]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append((int(entry.name), sum(map(int, fields[11:15])) / tick))
    while waiting:
        for child, seconds in parents.get(waiting.pop(), ()):
            total += seconds
            waiting.append(child)
    return total


def check(spec: ImageSpec, patch: bytes, of_git: bytes) -> None:
    """Apply both patches by git, and compare the trees."""
    repository = spec.layers[1] / "testbed"
    trees = []
    for text in (patch, of_git):
        for command in (["reset", "-q", "--hard"], ["clean", "-qfdx"], ["apply", "--index"], ["write-tree"]):
            done = subprocess.run(["git", "-C", str(repository), *command], input=text, capture_output=True, check=True)
        trees.append(done.stdout)
    if trees[0] != trees[1]:
        raise SystemExit("the patches differ")


if __name__ == "__main__":
    main()
