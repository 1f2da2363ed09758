"""Measure the store: publishing, sharing, opening, verifying, collecting, travelling.

    python benchmarks/bench_store.py [--quick] [--directory DIR] [--json FILE]

The tree that is published is a copy of the site-packages of the environment that runs this. What publishing cost before
files were shared, one measuring walk, one write-back and one rename, is done in the same run, alternately.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from minisandbox.images import export_images, import_images
from minisandbox.store import ImageRecord, Made, Store, measure_tree, step_key
from minisandbox.store.collect import collect, remove_images
from minisandbox.store.disk.durable import sync_directory, sync_filesystem
from minisandbox.store.leases import Holder, Lease
from minisandbox.store.sizes import StoreSizes
from minisandbox.store.verify import verify

SITE = Path(sysconfig.get_paths()["purelib"])
MB = 1_000_000
MOMENT = 946684800
Result = TypeVar("Result")
Row = tuple[str, float]


def main() -> None:
    """Run every measurement and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each thing once, with a smaller store")
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where the stores are made (default: home)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, uid {os.geteuid()}, load {os.getloadavg()[0]:.2f}")
    results: dict[str, float] = {}
    place = Path(tempfile.mkdtemp(prefix="minisandbox-bench-", dir=options.directory))
    try:
        for name, value in measure(place, 1 if options.quick else 3, 50 if options.quick else 500):
            results[name] = value
            print(f"{name:<78} {value:10.2f}   load {os.getloadavg()[0]:.2f}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(place: Path, rounds: int, many: int) -> Iterator[Row]:
    """Yield (what, value) pairs: seconds, milliseconds, megabytes or ratios, as the name says."""
    template = place / "template"
    shutil.copytree(SITE, template, symlinks=True)
    settle(template)
    size = measure_tree(template)
    yield "tree: MB on disk", size.bytes / MB
    yield "tree: files", size.files
    store = Store.open(place / "store")
    yield from publishing(store, template, place / "plain", rounds)
    yield from travelling(store, place)
    yield from sharing(Store.open(place / "sets"), template)
    yield from opening(Store.open(place / "many"), many)


def settle(tree: Path) -> None:
    """Give every file one mtime, as build steps do."""
    for path in tree.rglob("*"):
        if not path.is_dir() or path.is_symlink():
            os.utime(path, (MOMENT, MOMENT), follow_symlinks=False)


def publishing(store: Store, template: Path, plain: Path, rounds: int) -> Iterator[Row]:
    """Publish the same tree again and again, as layers of one store, and as they were published before."""
    plain.mkdir()
    times: dict[str, list[tuple[float, float]]] = {"first": [], "equal": [], "plain": []}
    for number in range(rounds):
        times["first"].append(publish(store, f"first{number}", template, mark=number + 1))
        times["equal"].append(publish(store, f"equal{number}", template, mark=0))
        times["plain"].append(publish_plain(plain, str(number), template))
    for what, index in (("wall", 0), ("CPU", 1)):
        medians = {name: statistics.median(value[index] for value in values) for name, values in times.items()}
        yield f"publish, nothing equal in the store, {what} s", medians["first"]
        yield f"publish, all of it in the store already, {what} s", medians["equal"]
        yield f"measure, write back and rename, as before files were shared, {what} s", medians["plain"]


def copied(template: Path, target: Path, mark: int) -> None:
    """A copy as a build leaves it: its data is not on the disk yet."""
    subprocess.run(["cp", "-a", str(template), str(target)], check=True)
    if mark:
        for path in target.rglob("*"):
            if path.is_file() and not path.is_symlink():
                os.utime(path, (MOMENT + mark, MOMENT + mark))


def publish(store: Store, name: str, template: Path, *, mark: int) -> tuple[float, float]:
    """Publish a copy; return the seconds that took, by the clock and of CPU."""
    begun = (0.0, 0.0)

    def make(work: Path) -> Made:
        nonlocal begun
        copied(template, work / "tree", mark)
        begun = time.monotonic(), time.process_time()
        return Made(work / "tree")

    key = step_key(None, {"name": name})
    store.ensure_layer(key, parent=None, step={"name": name}, make=make)
    seconds = time.monotonic() - begun[0], time.process_time() - begun[1]
    image(store, name, key)
    return seconds


def image(store: Store, name: str, *keys: str) -> None:
    """Record an image."""
    store.put_image(ImageRecord(name, keys[-1], keys, (), "/testbed", None, "", time.time()))


def publish_plain(place: Path, name: str, template: Path) -> tuple[float, float]:
    """What publishing was before: a walk, a write-back, a rename."""
    (place / f"work{name}").mkdir()
    copied(template, place / f"work{name}/tree", 0)
    begun = time.monotonic(), time.process_time()
    measure_tree(place / f"work{name}")
    sync_filesystem(place / f"work{name}")
    (place / f"work{name}").rename(place / f"done{name}")
    sync_directory(place)
    return time.monotonic() - begun[0], time.process_time() - begun[1]


def travelling(store: Store, place: Path) -> Iterator[Row]:
    """Verify, export, import, collect."""
    seconds, report = timed(lambda: verify(store))
    yield "verify without reading, thousand files a second", report.files / seconds / 1e3
    seconds, report = timed(lambda: verify(store, full=True))
    yield "verify every byte, thousand files a second", report.files / seconds / 1e3
    for compression in ("gzip", "zstd"):
        file = place / f"{compression}.tar"
        seconds, _ = timed(lambda: export_images(store, ["equal0"], file, compression=compression, private=True))  # noqa: B023
        size = sum(store.layer(key).bytes for key in store.image("equal0").layers)
        yield f"export with {compression}, MB of files a second", size / MB / seconds
        yield f"export with {compression}: files / archive", size / file.stat().st_size
        other = Store.open(place / compression)
        seconds, _ = timed(lambda: import_images(file, store=other, private=True))  # noqa: B023
        yield f"import with {compression}, MB of files a second", size / MB / seconds
        seconds, _ = timed(lambda: import_images(file, store=other, private=True))  # noqa: B023
        yield "import of what is there, ms", seconds * 1e3
    seconds, _ = timed(lambda: collect(store, grace=0))
    yield "collect, nothing to remove, ms", seconds * 1e3
    files = store.layer(store.image("first0").key).files
    seconds, _ = timed(lambda: remove_images(store, ["first0"]))
    yield "remove an image that shares nothing, thousand files a second", files / seconds / 1e3


def sharing(store: Store, template: Path) -> Iterator[Row]:
    """Eight layers, each with seven in ten of the packages, as requirements of different projects overlap."""
    chance = random.Random(8)
    packages = sorted(path.name for path in template.iterdir())
    plain = 0
    for number in range(8):
        chosen = [name for name in packages if chance.random() < 0.7]

        def make(work: Path, chosen: list[str] = chosen) -> Made:
            (work / "tree").mkdir()
            subprocess.run(["cp", "-a", *(str(template / name) for name in chosen), str(work / "tree")], check=True)
            return Made(work / "tree")

        key = step_key(None, {"set": number})
        record, _ = store.ensure_layer(key, parent=None, step={"set": number}, make=make)
        image(store, str(number), key)
        plain += record.bytes
    total = StoreSizes(store, store.images()).total
    yield "8 overlapping sets of packages: MB without sharing", plain / MB
    yield "8 overlapping sets of packages: MB in the store, lists of files included", total / MB
    yield "8 overlapping sets of packages: ratio", total / plain


def opening(store: Store, many: int) -> Iterator[Row]:
    """What a process pays that finds everything there, in a store of many layers."""
    for number in range(many):

        def make(work: Path, number: int = number) -> Made:
            (work / "tree").mkdir()
            (work / "tree/file").write_text(str(number))
            return Made(work / "tree")

        key = step_key(None, {"n": number})
        store.ensure_layer(key, parent=None, step={"n": number}, make=make)
        image(store, str(number), key)
    keys = store.layer_keys()
    yield f"open a store of {many} layers, ms", median_ms(lambda: Store.open(store.root))
    one = store.image("7")
    yield "read an image and find its layers, ms", median_ms(lambda: [store.layer_tree(key) for key in one.layers])
    holder = Holder()
    layers = [store.layer_directory(key) for key in keys[:7]]

    def hold() -> None:
        with Lease(holder) as lease:
            lease.add(layers)

    yield "hold seven layers and let go, ms", median_ms(hold)
    yield f"sizes of all {many} images, ms", median_ms(lambda: StoreSizes(store, store.images()).total)


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """How long a call takes, in seconds, and what it returns."""
    begun = time.monotonic()
    result = call()
    return time.monotonic() - begun, result


def median_ms(call: Callable[[], object]) -> float:
    """The median of 25 calls, in milliseconds."""
    return statistics.median(timed(call)[0] for _ in range(25)) * 1e3


if __name__ == "__main__":
    main()
