"""Measure what images of tasks take on disk: ready, frozen, in podman, and as the original's archives.

    python -m benchmarks.disk build --pins DIR [--sample 20] [--torch-backend cpu] --store DIR
    python -m benchmarks.disk measure --store DIR [--podman DIR] [GLOB ...]

`build` installs a random sample of the exported environments (SWE-smith's: REPO.COMMIT/*.yml), one image each.
`measure` only reads the store: it compresses each layer as `image gc --freeze` does, and adds up the images that match.
The original's way is a gzip archive per image; archives share nothing. podman imports each of our layers once, so its
images share as much as ours; `--podman` names a new directory for its storage, and needs root.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, cast

from benchmarks.images.engine import private_engine

from minisandbox.errors import MiniSandboxError
from minisandbox.images import build
from minisandbox.spec import PythonRecipe, read_pins
from minisandbox.store import Store
from minisandbox.store.blobs.layer_blobs import tar_of
from minisandbox.store.blobs.packing import GZIP, ZSTD, pack
from minisandbox.store.disk.trees import measure_tree
from minisandbox.store.sizes import measure_layer, stack_of

MB = 1_000_000
_SMITH = re.compile(r".+\.[0-9a-f]{8}")


class Nowhere(io.RawIOBase):
    """A file that forgets what is written to it."""

    def write(self, data: object, /) -> int:
        """Take everything."""
        return len(memoryview(data))  # type: ignore[arg-type] # any buffer


def main() -> int:
    """Build a sample, or measure a store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "measure"))
    parser.add_argument("globs", nargs="*", default=["*"], metavar="GLOB", help="images to measure (default: all)")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--pins", type=Path, help="the exported environments")
    parser.add_argument("--sample", type=int, default=20, help="number of environments (default: 20)")
    parser.add_argument("--torch-backend", choices=("", "cpu"), default="")
    parser.add_argument("--podman", type=Path, help="a new directory for podman's storage")
    options = parser.parse_args()
    if options.action == "build":
        build_sample(Store.open(options.store), options.pins, options.sample, options.torch_backend)
    else:
        print_sizes(Store.open(options.store, read_only=True), options.globs, options.podman)
    return 0


def build_sample(store: Store, pins: Path, count: int, torch_backend: str) -> None:
    """Install a random sample of environments; print those that the package index does not have."""
    folders = sorted(path for path in pins.iterdir() if _SMITH.fullmatch(path.name))
    for folder in random.Random(41).sample(folders, count):
        export = read_pins(next(iter(sorted(folder.glob("*.yml")))))
        recipe = PythonRecipe(
            python=".".join(export.python.split(".")[:2]), requirements=tuple(export.requirements), complete=True,
            torch_backend=torch_backend,
        )  # fmt: skip
        try:
            build(recipe, store=store, name=folder.name)
            print(f"{folder.name}: {len(export.requirements)} packages", flush=True)
        except MiniSandboxError as error:
            print(f"{folder.name}: not built: {str(error)[:300]}", flush=True)


def print_sizes(store: Store, globs: Sequence[str], podman: Path | None) -> None:
    """Print one row for the images that match."""
    images = [image for image in store.images() if any(fnmatchcase(image.name, glob) for glob in globs)]
    stacks = {image.name: stack_of(image) for image in images}
    keys = {key for stack in stacks.values() for key in stack}
    frozen, archives, objects, private = 0, dict[str, int](), dict[str, int](), 0
    for key in sorted(keys):
        layer = measure_layer(store, key)
        objects |= layer.objects
        private += layer.private
        frozen += packed(store, key, ZSTD)
        archives[key] = packed(store, key, GZIP)
    original = sum(archives[key] for stack in stacks.values() for key in stack)
    rows = {"ready": private + sum(objects.values()), "frozen": frozen, "original's way": original}
    if podman is not None:
        rows["podman"] = in_podman(store, sorted(keys), podman)
    print(f"{len(images)} images, {len(keys)} layers")
    for title, size in rows.items():
        print(f"{title:<16} {size / MB:10,.0f} MB {size / original:6.2f} of the original's", flush=True)


def packed(store: Store, key: str, compression: str) -> int:
    """Return the size of a layer's blob."""
    return pack(tar_of(store.root, key), compression, cast("IO[bytes]", Nowhere())).size


def in_podman(store: Store, keys: Sequence[str], storage: Path) -> int:
    """Import layers into podman, each as an image of its own, and return the bytes of its storage on disk."""
    with private_engine(storage) as engine:
        for key in keys:
            words = engine.podman_words("import", "--quiet", "-", f"localhost/{key}")
            importer = subprocess.Popen(
                words, env=engine.environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=1 << 20
            )
            with importer, cast("IO[bytes]", importer.stdin) as stdin:
                stdin.writelines(tar_of(store.root, key))
            if importer.returncode:
                raise SystemExit(f"podman import of layer {key} ends with {importer.returncode}")
        return measure_tree(engine.storage).bytes


if __name__ == "__main__":
    sys.exit(main())
