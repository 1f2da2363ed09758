"""Pull a family of images as a set, in alternation with podman, which pulls them one by one.

    python -m benchmarks.images.family [--images 100] [--pairs 3] [--directory DIR]

The images have a base layer of 2,000 small files and a layer of their own with five. MiniSandbox pushes them as a set
to a local docker-registry; podman's view of one of them is checked. As root, with the packages of `make bench-images`.
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
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.images.engine import in_private_mounts, private_engine, remove_storage
from benchmarks.images.sources import registry

from minisandbox.images import import_images, push_set
from minisandbox.images.oci import manifest as m
from minisandbox.store import Store

_BASE_FILES, _OWN_FILES, _FILE = 2000, 5, 8000


def main() -> int:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path.home())
    options = parser.parse_args()
    if (status := in_private_mounts("benchmarks.images.family")) is not None:
        return status
    work = Path(tempfile.mkdtemp(prefix="f-", dir=options.directory))
    try:
        with registry(work) as host:
            reference = f"{host}/team/family:set"
            names = fill(work, reference, options.images)
            pairs = [pull_both(work / f"{number}", host, reference, names) for number in range(options.pairs)]
    finally:
        remove_storage(work)
    walls, cpus = ([ours[index] / theirs[index] for ours, theirs in pairs] for index in (0, 1))
    for (ours, ours_cpu), (theirs, theirs_cpu) in pairs:
        print(f"set {ours:.1f} s ({ours_cpu:.1f} CPU), podman {theirs:.1f} s ({theirs_cpu:.1f} CPU)")
    print(f"{options.images} images, set / podman: {statistics.median(walls):.2f}; CPU {statistics.median(cpus):.2f}; "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    return 0


def fill(work: Path, reference: str, images: int) -> list[str]:
    """Push the family as a set; return the names."""
    store = Store.open(work / "pushed")
    names = [image.name for image in import_images(layout_of(work / "layout", images), store=store)]
    push_set(names, reference, store=store)
    return names


def pull_both(
    work: Path, host: str, reference: str, names: list[str]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Pull into an empty store and into an empty storage of podman; return the wall and CPU seconds of each."""
    work.mkdir()
    words = [sys.executable, "-m", "minisandbox", "image", "pull", "--set", reference]
    # Without byte code, which a test machine may forbid to write, each command would compile the package again.
    environment = {**os.environ, "MINISANDBOX_STORE": str(work / "store"), "PYTHONDONTWRITEBYTECODE": ""}
    ours = cost(lambda: subprocess.run(words, env=environment, check=True, capture_output=True))
    assert len(Store.open(work / "store").image_names()) == len(names)
    with private_engine(work / "p") as engine:

        def one_by_one() -> None:
            for name in names:
                engine.podman("pull", "--quiet", "--tls-verify=false", f"{host}/team/family:{name}")

        theirs = cost(one_by_one)
        with engine.mounted(f"{host}/team/family:{names[0]}") as tree:
            assert len(list(tree.rglob("*"))) == _BASE_FILES + _OWN_FILES + 2
    remove_storage(work)
    return ours, theirs


def cost(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds of a call and the CPU seconds of its processes."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu


def layout_of(path: Path, images: int) -> Path:
    """Write an OCI layout of a family."""
    noise = random.Random(1)
    blobs, rows = path / "blobs" / "sha256", []
    blobs.mkdir(parents=True)

    def add(content: bytes, kind: str) -> dict[str, object]:
        name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(content)}

    def layer(folder: str, files: int) -> tuple[str, dict[str, object]]:
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            for number in range(files):
                info = tarfile.TarInfo(f"{folder}/{number}")
                info.size = _FILE
                archive.addfile(info, io.BytesIO(noise.randbytes(_FILE // 2).hex().encode()))
        content = tar.getvalue()
        blob = add(gzip.compress(content, 1, mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip")
        return f"sha256:{hashlib.sha256(content).hexdigest()}", blob

    base = layer("base", _BASE_FILES)
    for number in range(images):
        layers = (base, layer(f"task-{number}", _OWN_FILES))
        rootfs = {"type": "layers", "diff_ids": [diff_id for diff_id, _ in layers]}
        config = json.dumps({"os": "linux", "architecture": "amd64", "config": {}, "rootfs": rootfs}).encode()
        described = add(config, "application/vnd.oci.image.config.v1+json")
        manifest = {
            "schemaVersion": 2,
            "mediaType": m.MANIFEST,
            "config": described,
            "layers": [blob for _, blob in layers],
        }
        rows.append({**add(json.dumps(manifest).encode(), m.MANIFEST), "annotations": {m.REF_NAME: f"task-{number}"}})
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": rows}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path


if __name__ == "__main__":
    sys.exit(main())
