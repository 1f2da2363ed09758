"""Measure pulls, unpacking and builds in alternation with podman, tar and buildah.

Everything lies on an ext4 file system of its own in a sparse file: it has a journal, as users' file systems do.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.images.building import layout_of
from benchmarks.images.engine import Engine, private_engine, run, say
from benchmarks.images.projects import PROJECTS
from benchmarks.images.sources import Sources, fill_registry, registry
from benchmarks.images.users import User, at, remove_store, user_of
from tests.unit.oci_tools import END, MadeImage, entry

QUANTITIES = ("pull", "unpack", "build")
_DOCKERFILE = """\
FROM {base}
COPY repository /opt/copied
RUN useradd --create-home measured && chown -R measured /opt/copied
RUN python -m pip install --quiet --no-index --no-deps --no-build-isolation --target /opt/installed /opt/copied
RUN cp -a /opt/installed /opt/again && rm -r /opt/installed
"""
_LAYERS = {"60 files of 5 MB": (60, 5_000_000, 5_000_000), "10,000 files of 0.2 to 8 kB": (10_000, 200, 8_000)}
_SPACE = 16 << 30

Cost = tuple[float, float]
"""Seconds, and CPU seconds."""


@dataclass(frozen=True, slots=True)
class _Speed:
    user: User
    sources: Sources
    place: Path
    costs: dict[str, list[tuple[Cost, Cost]]] = field(default_factory=dict)

    def pair(self, quantity: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        """Measure both sides, in an order that changes from pair to pair."""
        pairs = self.costs.setdefault(quantity, [])
        sides = [ours, theirs] if len(pairs) % 2 else [theirs, ours]
        costs = {side: _cost(side) for side in sides}
        pairs.append((costs[ours], costs[theirs]))
        (seconds, cpu), (their_seconds, their_cpu) = pairs[-1]
        load = os.getloadavg()[0]
        say(f"{quantity}: {seconds:.2f} s, CPU {cpu:.2f}; theirs {their_seconds:.2f}, {their_cpu:.2f}; load {load:.1f}")

    def pull(self) -> None:
        """Pull an image and run a first command, in an empty store; then another image of the family."""
        user = at(self.user, "pulls")
        with private_engine(self.place / "p") as engine:
            for image, quantity in zip(PROJECTS[0].images, ("first", "second"), strict=True):
                self.pair(
                    f"{quantity} image of a family, pull and first command (podman)",
                    lambda: self._our_first_command(user, image),  # noqa: B023 - called at once
                    lambda: self._their_first_command(engine, image),  # noqa: B023
                )
        remove_store(user)

    def _our_first_command(self, user: User, image: str) -> None:
        user.pull(self.sources.at_registry(image), image)
        user.check("sandbox", "run", "--image", image, "--", "true")

    def _their_first_command(self, engine: Engine, image: str) -> None:
        engine.podman("pull", "--quiet", "--tls-verify=false", self.sources.at_registry(image))
        engine.podman("run", "--rm", "--network", "none", self.sources.at_registry(image), "true")

    def unpack(self) -> None:
        """Pull images of one layer from an OCI layout; tar unpacks the same blobs."""
        user, tree = at(self.user, "unpacking"), self.place / "tree"
        for name, sizes in _LAYERS.items():
            layout = self.place / name.split(maxsplit=1)[0]
            if not layout.exists():
                MadeImage([_layer(*sizes)]).write_layout(layout)
            blob = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
            user.check("image", "ls")  # creates the store
            tree.mkdir()
            self.pair(
                f"unpacking {name} (tar -xzf)",
                lambda: user.pull(f"oci:{layout}", "unpacked"),  # noqa: B023 - called at once
                lambda: run("tar", "-xzf", blob, "-C", tree, "--xattrs", "--overwrite"),  # noqa: B023
            )
            remove_store(user)
            shutil.rmtree(tree)

    def build(self) -> None:
        """Build a Dockerfile of four steps over a pulled image, with a changed context; then again, unchanged."""
        context, user, engine = self.place / "context", at(self.user, "builds"), self.sources.engine
        base = PROJECTS[0].images[0]
        if not context.exists():
            source = self.place.parent.parent / "contexts" / PROJECTS[0].name / "repository"
            shutil.copytree(source, context / "repository", symlinks=True)
            (context / "Dockerfile").write_text(_DOCKERFILE.format(base=self.sources.at_registry(base)))
            self._our_first_command(user, base)
            self._their_first_command(engine, base)
        words = "--file", str(context / "Dockerfile"), str(context)
        (context / "repository" / "number").write_text(str(time.time_ns()))
        for quantity in ("Dockerfile of four steps (buildah)", "Dockerfile without a change (buildah)"):
            self.pair(
                quantity,
                lambda: user.check("image", "build", "--name", "measured", *words),
                lambda: engine.buildah(
                    "bud", "--layers", "--pull-never", "--isolation", "chroot", "--tag", "measured", *words
                ),
            )  # fmt: skip

    def table(self) -> str:
        """Return the medians, and the medians of the pairs' ratios."""
        titles = ("", "MiniSandbox, s", "theirs, s", "ratio", "CPU, s", "theirs, s", "ratio")
        lines = [f"| {' | '.join(titles)} |", f"|---|{'--:|' * 6}"]
        for quantity, pairs in self.costs.items():
            cells = []
            for index in range(2):  # wall time, CPU time
                ours, theirs = ([pair[side][index] for pair in pairs] for side in range(2))
                ratio = statistics.median(own / their for own, their in zip(ours, theirs, strict=True))
                cells += [statistics.median(ours), statistics.median(theirs), ratio]
            lines.append(f"| {quantity} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
        return "\n".join(lines)


def measure_speed(cache: Path, place: Path, quantities: list[str], pairs: int) -> str:
    """Measure as root; return a table.

    Args:
        cache: the directory with the built images.
        place: a new directory for temporary files.
        quantities: some of :data:`QUANTITIES`.
        pairs: number of pairs of each.
    """
    with (
        _journaled(place) as disk, private_engine(disk / "e") as engine, registry(place) as host,
        user_of("root", disk) as user,
    ):  # fmt: skip
        fill_registry(host, layout_of(cache), engine, PROJECTS[0].images)
        speed = _Speed(user, Sources(disk, layout_of(cache), host, engine), disk)
        for _ in range(pairs):
            for quantity in quantities:
                getattr(speed, quantity)()
        return speed.table()


@contextmanager
def _journaled(place: Path) -> Iterator[Path]:
    """Mount an ext4 file system in a sparse file; the caller is in a mount namespace of its own."""
    image, disk = place / "disk.img", place / "d"
    disk.mkdir()
    image.touch()
    os.truncate(image, _SPACE)
    run("mkfs.ext4", "-q", "-F", image)
    run("mount", "-o", "loop", image, disk)
    try:
        yield disk
    finally:
        run("umount", "--lazy", disk)


def _layer(count: int, smallest: int, largest: int) -> bytes:
    """Return a tar of files of words and random bytes, 100 in a directory."""
    source = random.Random(1)
    words = [source.randbytes(source.randint(1, 5)).hex().encode() for _ in range(4_000)]
    text = b" ".join(source.choices(words, k=200_000)) + source.randbytes(100_000)
    text *= 1 + largest // len(text)
    files = []
    for number in range(count):
        start = source.randrange(len(text))
        size = source.randint(smallest, largest)
        files.append(entry(f"{number // 100}/{number}", (text[start:] + text[:start])[:size]))
    return b"".join(files) + END


def _cost(action: Callable[[], object]) -> Cost:
    """Return the seconds that an action takes, and the CPU seconds of the programs that it waits for."""
    os.sync()  # neither side writes the other's data
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    action()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
