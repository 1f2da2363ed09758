"""Measure disk next to podman, and creation over a pulled and over a native image."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images.engine import private_engine, remove_storage, run, say
from benchmarks.images.projects import NAMES
from benchmarks.images.sources import Sources, fill_registry, registry
from benchmarks.images.users import User, at, user_of

from minisandbox import Sandbox
from minisandbox.images import load_image
from minisandbox.store import Store
from minisandbox.store.entries import read_entries
from minisandbox.types import ImageSpec

_CREATIONS = 200
_NATIVE = 'base = "host"\n' + "".join(f'[[step]]\nrun = "echo {number} > /layer-{number}"\n' for number in range(4))
_MB = 1_000_000

Row = tuple[str, str, str, str]
"""What is measured, ours, theirs, the ratio."""


@dataclass(frozen=True, slots=True)
class _Measuring:
    user: User
    sources: Sources
    place: Path

    def rows(self) -> Iterator[Row]:
        """Measure one thing after the other."""
        yield from self._disk()
        yield from self._times_in_keys()
        yield from self._creation(NAMES[0])
        yield from self._frozen()

    def _creation(self, image: str) -> Iterator[Row]:
        """Create a sandbox and run a command over a container image, and over an image built over the host's files."""
        recipe = self.place / "native.toml"
        recipe.write_text(_NATIVE)
        user = at(self.user, "disk")
        user.check("image", "build", str(recipe), "--name", "native")
        store = Store.open(user.store)
        specs = [load_image(store, name).spec() for name in (image, "native")]
        times = [[first_result(spec) for spec in specs] for _ in range(_CREATIONS + 1)][1:]
        yield _paired(
            f"create to first result, {_CREATIONS} pairs (native image), ms",
            [pair[0] * 1000 for pair in times], [pair[1] * 1000 for pair in times],
        )  # fmt: skip

    # --- space ---

    def _disk(self) -> Iterator[Row]:
        """Take all images in, one after the other."""
        user, engine = at(self.user, "disk"), self.sources.engine
        ours, theirs = [], []
        for image in NAMES:
            user.pull(self.sources.at_registry(image), image)
            engine.podman("pull", "--quiet", "--tls-verify=false", self.sources.at_registry(image))
            ours.append(disk_usage(user.store))
            theirs.append(disk_usage(engine.storage))
        first = [values[0] / _MB for values in (ours, theirs)]
        yield f"disk of {NAMES[0]}, MB", *_numbers(*first)
        more = [(values[1] - values[0]) / _MB for values in (ours, theirs)]
        yield f"{NAMES[1]} adds, MB", *_numbers(*more)
        yield "the same, of the first, %", *_numbers(100 * more[0] / first[0], 100 * more[1] / first[1])
        yield f"disk of {len(NAMES)} images, MB", *_numbers(ours[-1] / _MB, theirs[-1] / _MB)
        blobs = disk_usage(self.sources.layout)
        yield "their compressed blobs, MB", _shown(blobs / _MB), _shown(theirs[-1] / _MB), f"{blobs / theirs[-1]:.2f}"

    def _frozen(self) -> Iterator[Row]:
        """Compress all images, as after a time without use."""
        user, theirs = at(self.user, "disk"), disk_usage(self.sources.engine.storage)
        user.check("image", "rm", "native")
        user.check("image", "gc", "--freeze", "--unused-for", "0s", "--grace", "0s")
        yield f"disk of {len(NAMES)} images, frozen, MB", *_numbers(disk_usage(user.store) / _MB, theirs / _MB)

    def _times_in_keys(self) -> Iterator[Row]:
        """Count what files of several layers take, once for each time and once for each content."""
        store = Store.open(at(self.user, "disk").store)
        with_time, without = {}, {}
        for record in store.layers():
            for entry in read_entries(store.layer_directory(record.key)):
                if entry.digest and not entry.same:
                    key = (entry.digest, entry.mode, entry.uid, entry.gid, entry.attributes)
                    with_time[*key, entry.mtime] = without[key] = entry.disk
        yield (
            "files, and if times did not count, MB",
            *_numbers(sum(with_time.values()) / _MB, sum(without.values()) / _MB),
        )


def measure_all(layout: Path, place: Path) -> str:
    """Measure everything as root; returns a table.

    Args:
        layout: an OCI layout of all images.
        place: a new directory for temporary files.
    """
    rows: list[Row] = [("", "MiniSandbox", "podman, or as named", "ratio")]
    with private_engine(place / "e") as engine, registry(place) as host, user_of("root", place) as user:
        fill_registry(host, layout, engine, NAMES)
        for row in _Measuring(user, Sources(place, layout, host, engine), place).rows():
            say(f"{' | '.join(row)} | load {os.getloadavg()[0]:.1f}")
            rows.append(row)
        remove_storage(engine.place)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---|--:|--:|--:|", *lines[1:]])


def disk_usage(tree: Path) -> int:
    """Return the bytes that a tree takes on disk, each inode once."""
    return int(run("du", "-s", "--dereference-args", "--block-size=1", tree).split()[0])


def first_result(spec: ImageSpec) -> float:
    """Seconds from create() to a first command's result."""
    start = time.perf_counter()
    box = Sandbox.create(spec)
    assert box.exec(["true"]).ok
    seconds = time.perf_counter() - start
    box.stop()
    return seconds


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _numbers(ours: float, theirs: float) -> tuple[str, str, str]:
    return _shown(ours), _shown(theirs), f"{ours / theirs:.2f}"


def _paired(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Medians, and the median of the ratios of pairs."""
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    return what, _shown(statistics.median(ours)), _shown(statistics.median(theirs)), f"{ratio:.2f}"
