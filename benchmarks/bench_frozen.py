"""What freezing saves on real images, and what freezing and thawing them cost.

python benchmarks/bench_frozen.py STORE [IMAGE...] [--directory DIR]

STORE is only read: its images (all, or those named) are taken over into a store that is removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from minisandbox.images import load_image
from minisandbox.images.travel import import_directory
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.store.freezing import freeze, thaw_images
from minisandbox.store.sizes import stack_of
from minisandbox.store.verify import verify

MB = 1_000_000
Result = TypeVar("Result")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, metavar="STORE", help="a store with real images")
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="which of them (default: all)")
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where the store is made (default: home)")
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, uid {os.geteuid()}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="minisandbox-bench-", dir=options.directory))
    try:
        store = Store.open(place / "store")
        import_directory(store, options.store, options.images or None)
        measure(store)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measure(store: Store) -> None:
    """Freeze everything, use two images, freeze again, thaw everything."""
    names = store.image_names()
    plain = taken(store)
    print(f"{len(names)} images, {len(store.layer_keys())} layers: {plain / MB:.1f} MB plain", flush=True)
    done = timed("freeze all", lambda: freeze(store, names))
    print(f"  {done.packed / MB:.1f} MB of contents in {done.packs / MB:.1f} MB of packs")
    frozen = taken(store)
    print(f"  {frozen / MB:.1f} MB frozen, ratio {frozen / plain:.3f}", flush=True)
    for name in (names[0], names[-1]):
        image = store.image(name)
        layers = [store.layer(key) for key in stack_of(image) if store.is_frozen(key)]
        size, files = sum(layer.bytes for layer in layers), sum(layer.files for layer in layers)
        print(f"{name}: {len(layers)} frozen layers, {files} files, {size / MB:.1f} MB plain")
        timed("  first command, frozen", lambda name=name: command(store, name))  # type: ignore[misc]
        timed("  first command, plain", lambda name=name: command(store, name))  # type: ignore[misc]
    timed("freeze these again", lambda: freeze(store, names))
    timed("thaw all", lambda: thaw_images(store, names))
    report = timed("verify every byte", lambda: verify(store, full=True))
    print(f"  {len(report.damaged)} damaged")


def command(store: Store, name: str) -> None:
    """Make a sandbox of an image and run its first command."""
    with Sandbox.create(load_image(store, name).spec()) as box:
        box.exec(["true"]).check()


def timed(what: str, call: Callable[[], Result]) -> Result:
    """Do something and print what it took."""
    wall, cpu = time.monotonic(), time.process_time()
    result = call()
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    print(f"{what}: {wall:.2f} s, {cpu:.2f} s of CPU   load {os.getloadavg()[0]:.2f}", flush=True)
    return result


def taken(store: Store) -> int:
    """The bytes on disk of everything in a store, every inode once."""
    inodes = {}
    for folder, folders, names in os.walk(store.root):
        for name in (*folders, *names):
            info = os.lstat(f"{folder}/{name}")
            inodes[info.st_ino] = info.st_blocks * 512
    return sum(inodes.values())


if __name__ == "__main__":
    main()
