"""Measure pulls, builds, disk, unpacking and creation, in alternation with podman, buildah and tar."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images.engine import Engine, private_engine, remove_storage, run, say
from benchmarks.images.projects import NAMES, PROJECTS
from benchmarks.images.sources import Sources, fill_registry, registry
from benchmarks.images.users import User, at, remove_store, user_of

from minisandbox import Sandbox
from minisandbox.images import load_image
from minisandbox.store import Store
from minisandbox.store.entries import read_entries
from minisandbox.types import ImageSpec

_PAIRS = 3
_CREATIONS = 200
_DOCKERFILE = """\
FROM {base}
COPY repository /opt/copied
RUN useradd --create-home measured && chown -R measured /opt/copied
RUN python -m pip install --quiet --no-index --no-deps --no-build-isolation --target /opt/installed /opt/copied
RUN cp -a /opt/installed /opt/again && rm -r /opt/installed
"""
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
        first, second = PROJECTS[0].images
        yield from self._pulls(first, second)
        yield from self._builds(first)
        yield from self._unpacking(first)
        yield from self._disk()
        yield from self._times_in_keys()
        yield from self._creation(first)
        yield from self._frozen()

    # --- time ---

    def _pulls(self, first: str, second: str) -> Iterator[Row]:
        """Pull and run a first command, with nothing there, and with another image of the family there."""
        ours: dict[str, list[tuple[float, float]]] = {first: [], second: []}
        theirs: dict[str, list[tuple[float, float]]] = {first: [], second: []}
        for number in range(_PAIRS):
            user = at(self.user, f"pulls-{number}")
            with private_engine(self.place / "p") as engine:
                for image in (first, second):
                    ours[image].append(_cost(lambda: self._ours_first(user, image)))  # noqa: B023 - called at once
                    theirs[image].append(_cost(lambda: self._theirs_first(engine, image)))  # noqa: B023
            remove_store(user)
        yield from _costs("pull and first command, nothing there", ours[first], theirs[first])
        yield from _costs("the same, second image of the family", ours[second], theirs[second])

    def _ours_first(self, user: User, image: str) -> None:
        user.pull(self.sources.at_registry(image), image)
        user.check("sandbox", "run", "--image", image, "--", "true")

    def _theirs_first(self, engine: Engine, image: str) -> None:
        engine.podman("pull", "--quiet", "--tls-verify=false", self.sources.at_registry(image))
        engine.podman("run", "--rm", "--network", "none", self.sources.at_registry(image), "true")

    def _builds(self, base: str) -> Iterator[Row]:
        """Build a Dockerfile of four steps over a pulled image; each build is of another context."""
        context = self.place / "context"
        source = self.place.parent / "contexts" / PROJECTS[0].name / "repository"
        shutil.copytree(source, context / "repository", symlinks=True)
        (context / "Dockerfile").write_text(_DOCKERFILE.format(base=self.sources.at_registry(base)))
        user, engine = at(self.user, "builds"), self.sources.engine
        self._ours_first(user, base)
        self._theirs_first(engine, base)
        file, ours, theirs = str(context / "Dockerfile"), [], []
        build = ("image", "build", "--file", file, "--name", "measured", str(context))
        bud = (
            "bud",
            "--layers",
            "--pull-never",
            "--isolation",
            "chroot",
            "--tag",
            "measured",
            "--file",
            file,
            str(context),
        )
        for number in range(_PAIRS):
            (context / "repository" / "number").write_text(f"{number}")
            ours.append(_cost(lambda: user.check(*build)))
            theirs.append(_cost(lambda: engine.buildah(*bud)))
        yield from _costs("build of a Dockerfile of four steps (buildah)", ours, theirs)
        again = _cost(lambda: user.check(*build)), _cost(lambda: engine.buildah(*bud))
        yield from _costs("the same again, without a change", [again[0]], [again[1]])
        engine.podman("rmi", "--force", "--all")
        remove_store(user)

    def _unpacking(self, image: str) -> Iterator[Row]:
        """Take an image in from a layout; tar unpacks the same blobs, one after the other."""
        blobs = blobs_of(self.sources.layout, image)
        user, tree, ours, theirs = at(self.user, "unpacking"), self.place / "tree", [], []
        for _ in range(_PAIRS):
            ours.append(_cost(lambda: user.pull(f"oci:{self.sources.layout}:{image}", image)))
            theirs.append(_cost(lambda: _untar(blobs, tree)))
            remove_store(user)
            shutil.rmtree(tree)
        yield from _costs("unpacking from an OCI layout (tar -xzf)", ours, theirs)

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
    rows: list[Row] = [("", "MiniSandbox", "podman, or as said", "ratio")]
    with private_engine(place / "e") as engine, registry(place) as host, user_of("root", place) as user:
        fill_registry(host, layout, engine)
        for row in _Measuring(user, Sources(place, layout, host, engine), place).rows():
            say(f"{' | '.join(row)} | load {os.getloadavg()[0]:.1f}")
            rows.append(row)
        remove_storage(engine.place)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---|--:|--:|--:|", *lines[1:]])


def blobs_of(layout: Path, image: str) -> list[Path]:
    """Return the blobs of an image's layers in a layout, the lowest first."""
    values = json.loads(run("skopeo", "inspect", "--raw", f"oci:{layout}:{image}"))
    return [layout / "blobs" / layer["digest"].replace(":", "/") for layer in values["layers"]]


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


def _untar(blobs: Sequence[Path], tree: Path) -> None:
    tree.mkdir()
    for blob in blobs:
        run("tar", "-xzf", blob, "-C", tree, "--xattrs", "--overwrite")


def _cost(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that an action takes, and the CPU seconds of the programs that it waits for."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    action()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _numbers(ours: float, theirs: float) -> tuple[str, str, str]:
    return _shown(ours), _shown(theirs), f"{ours / theirs:.2f}"


def _costs(what: str, ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> Iterator[Row]:
    for number, kind in enumerate(("s", "CPU s")):
        yield _paired(f"{what}, {kind}", [pair[number] for pair in ours], [pair[number] for pair in theirs])


def _paired(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Medians, and the median of the ratios of pairs."""
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    return what, _shown(statistics.median(ours)), _shown(statistics.median(theirs)), f"{ratio:.2f}"
