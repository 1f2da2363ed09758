"""Measure a store of many small images next to a store of ten: listing, collecting, pulling, creating, kills.

    python benchmarks/store_scale.py [--images 10000] [--families 500] [--directory DIR]

A family is a base layer, and images that add one small layer. The stores are filled without a sync per layer, and
removed at the end: 350 MB and 170,000 inodes. Every figure is of the command as typed, in alternation, with the load
next to it; CPU seconds are those of the command.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.pull import root_key
from minisandbox.store import ImageRecord, Made, Store, publishing, step_key

_ROUNDS = 5
_BASE_FILES, _OWN_FILES, _FILE = 40, 4, 1500
_MOMENT = 946684800


def main() -> int:
    """Fill two stores and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--families", type=int, default=500)
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where the stores are made (default: home)")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="minisandbox-scale-", dir=options.directory))
    try:
        stores = {count: Store.open(work / f"store-{count}") for count in (10, options.images)}
        began = time.monotonic()
        for count, store in stores.items():
            fill(store, count, max(1, options.families * count // options.images))
        print(f"filled in {time.monotonic() - began:.0f} s; load {os.getloadavg()[0]:.1f}", flush=True)
        measure(work, stores)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def fill(store: Store, images: int, families: int) -> None:
    """Publish the layers and record the images, without syncs."""

    def no_sync(_: object) -> None:
        """Leave the writing to the kernel: these layers need not survive a crash."""

    with ExitStack() as patches:
        for module, name in ((publishing, "sync_directory"), (publishing, "sync_filesystem"), (os, "fsync")):
            patches.enter_context(mock.patch.object(module, name, no_sync))
        root = add_layer(store, None, "root", 1, key=root_key())
        for number in range(images):
            family = number % families
            base = add_layer(store, None, f"family {family}", _BASE_FILES)
            top = add_layer(store, base, f"image {number}", _OWN_FILES)
            name = f"family-{family}.task-{number}"
            key, notes = step_key(top, {"image": number}), {"reference": f"registry.example/{name}:1", "digest": ""}
            record = ImageRecord(
                name, key, (base, top, root), (("PATH", "/usr/bin"),), "/", None, "", time.time(), notes, own_root=True
            )
            store.put_image(record)


def add_layer(store: Store, parent: str | None, name: str, files: int, key: str = "") -> str:
    """Publish a layer of small files, three quarters of which are equal in all layers."""

    def make(staging: Path) -> Made:
        folder = staging / "tree" / "opt" / "layer"
        folder.mkdir(parents=True)
        for number in range(files):
            path = folder / f"{number}" if number < files * 3 // 4 else folder / f"{name} {number}"
            path.write_bytes(f"{path.name}\n".encode().ljust(_FILE, b"."))
            os.utime(path, (_MOMENT, _MOMENT))
        return Made(staging / "tree")

    key = key or step_key(parent, {"layer": name})
    store.ensure_layer(key, parent=parent, step={"kind": "container layer", "layer": name}, make=make)
    return key


def measure(work: Path, stores: dict[int, Store]) -> None:
    """Print a row for each question."""
    pull = ["image", "pull", f"oci:{layout_of(work / 'layout')}:new", "--name", "new"]
    rows = {
        "`image ls` after a change of all images": (1, ["image", "ls"]),
        "`image ls`": (_ROUNDS, ["image", "ls"]),
        "`image show` of one image": (_ROUNDS, ["image", "show", "family-0.task-0"]),
        "`image gc`, nothing to remove": (1, ["image", "gc"]),
        "`sandbox run -- COMMAND`": (_ROUNDS, ["sandbox", "run", "--image", "family-0.task-0", "--", "/opt/missing"]),
        "`image pull` of a small image": (1, pull),
        "the same, already there": (_ROUNDS, pull),
        "`image rm` of one image": (1, ["image", "rm", "new"]),
        "`image gc --unused-for 0s --grace 0s` of all images": (
            1,
            ["image", "gc", "--unused-for", "0s", "--grace", "0s"],
        ),
    }
    print(f"| wall time (CPU time), s | {' | '.join(f'{count:,} images' for count in stores)} | load |")
    print("|---|" + "--:|" * (len(stores) + 1))
    for title, (rounds, words) in rows.items():
        figures = {count: list[tuple[float, float]]() for count in stores}
        for _ in range(rounds):
            for count, store in stores.items():
                figures[count].append(timed(store, *words))
        medians = [map(statistics.median, zip(*pairs, strict=True)) for pairs in figures.values()]
        cells = ("{:.2f} ({:.2f})".format(*pair) for pair in medians)
        print(f"| {title} | {' | '.join(cells)} | {os.getloadavg()[0]:.1f} |", flush=True)


def timed(store: Store, *words: str) -> tuple[float, float]:
    """Return the wall seconds and CPU seconds of a command."""
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "minisandbox", *words],
        env={**os.environ, "MINISANDBOX_STORE": str(store.root), "PYTHONDONTWRITEBYTECODE": ""},  # as for users
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and words[0] != "sandbox":
        raise SystemExit(f"minisandbox {' '.join(words)} ends with {done.returncode}:\n{done.stderr[-2000:]}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def layout_of(path: Path) -> Path:
    """Write an OCI layout with one image of a small layer."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        info = tarfile.TarInfo("opt/new")
        info.size = _FILE
        archive.addfile(info, io.BytesIO(random.Random(1).randbytes(_FILE)))
    layer = gzip.compress(tar.getvalue(), mtime=0)
    config = {"os": "linux", "architecture": "amd64", "config": {}}
    config["rootfs"] = {"type": "layers", "diff_ids": [digest(tar.getvalue())]}
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(content: bytes, kind: str) -> dict[str, object]:
        (blobs / digest(content).partition(":")[2]).write_bytes(content)
        return {"mediaType": kind, "digest": digest(content), "size": len(content)}

    layers = [add(layer, "application/vnd.oci.image.layer.v1.tar+gzip")]
    described = add(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = json.dumps({"schemaVersion": 2, "mediaType": m.MANIFEST, "config": described, "layers": layers})
    row = {**add(manifest.encode(), m.MANIFEST), "annotations": {m.REF_NAME: "new"}}
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [row]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path


def digest(content: bytes) -> str:
    """Return the digest of a blob."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
