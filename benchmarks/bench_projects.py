"""What images of real projects take on disk: eight projects, five commits each, every inode counted once.

python benchmarks/bench_projects.py --repo-mirrors DIR [--directory DIR] [--tasks N] [--cold] [--frozen]

DIR has the projects' repositories, as `minisandbox image build --repo-mirrors` takes them: OWNER__NAME. Needs the
package index. The commits are those of release tags (projects.json); each task has the project's pinned packages,
pytest among them, and the project itself installed as editable. What builds keep besides images (downloads, mirrors)
is printed apart.

With --frozen all that there is is frozen after each project's first task and after its others, and the table is of what
that takes. With --cold (root) the page cache is dropped before commands, whose times stand beside those of warm ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import stat
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from minisandbox.git import run_git
from minisandbox.images import Image, build
from minisandbox.sandbox import Sandbox
from minisandbox.spec import GitSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import freeze

MB = 1_000_000
CONTAINERS = 1910
"""MB of unique layers that container images of the same eight projects took, one task each (docs/benchmarks.md)."""
CACHES = frozenset(("downloads", "index", "repositories"))
PYTHON = "3.11"
FILE = Path(__file__).with_name("projects.json")


@dataclass(frozen=True)
class Project:
    """One project.

    Attributes:
        name: what it is called, and imported as.
        repository: ``OWNER/NAME`` at GitHub.
        tags: of five releases.
        requirements: its pinned packages.
    """

    name: str
    repository: str
    tags: tuple[str, ...]
    requirements: tuple[str, ...]

    def recipe(self, commit: str) -> PythonRecipe:
        """The recipe of a task at a commit."""
        source = GitSource(f"https://github.com/{self.repository}", commit)
        install = ("python -m pip install --quiet --no-deps --editable .",)
        return PythonRecipe(source=source, python=PYTHON, requirements=self.requirements, install=install)


def main() -> None:
    """Build, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo-mirrors", type=Path, required=True, metavar="DIR", help="the projects' repositories")
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where the store is made (default: home)")
    parser.add_argument("--tasks", type=int, default=5, metavar="N", help="tasks of each project (default: 5)")
    parser.add_argument("--cold", action="store_true", help="also time commands with a cold page cache; takes root")
    parser.add_argument("--frozen", action="store_true", help="measure images that are frozen")
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, uid {os.geteuid()}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="minisandbox-bench-", dir=options.directory))
    try:
        store = Store.open(place / "store")
        if options.frozen:
            measure_frozen(store, options.repo_mirrors, options.tasks)
            return
        images = measure_projects(store, options.repo_mirrors, options.tasks)
        measure_live(store, images)
        if options.cold:
            measure_cold(images)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measure_projects(store: Store, mirrors: Path, tasks: int) -> dict[str, list[Image]]:
    """Build every task; print what each adds to the store."""
    print(
        "MB that each project adds: its first task, the four others together; of these what changed and what was built"
    )
    print("in them, and the rest, each as a share of their source trees")
    print(f"{'project':<12} {'tree':>7} {'first':>8} {'others':>8} {'own':>7} {'rest':>7} {'rest of tree':>13}")
    disk, images, firsts = Disk(store), dict[str, list[Image]](), []
    for project in projects():
        made, added, trees = images.setdefault(project.name, []), [], []
        for tag in project.tags[:tasks]:
            recipe = project.recipe(commit_of(mirrors / project.repository.replace("/", "__"), tag))
            made.append(build(recipe, store=store, name=f"{project.name}-{tag}", mirrors=mirrors))
            added.append(disk.grown())
            trees.append(tree_size(made[-1]))
        print_project(project.name, added, trees)
        firsts.append(added[0])
    total = disk.total()
    caches = ", ".join(f"{part} {blocks(store.root / part) / MB:.0f} MB" for part in sorted(CACHES))
    print(
        f"all of it: {total / MB:.0f} MB, {100 * total / MB / CONTAINERS:.0f} % of {CONTAINERS} MB; besides: {caches}"
    )
    return images


def measure_frozen(store: Store, mirrors: Path, tasks: int) -> None:
    """Build every task, and print what each project's first and further ones take when all of them are frozen."""
    print(
        "MB that each project adds, frozen: its first task, the others together, these as a share of their source trees"
    )
    print(f"{'project':<12} {'tree':>7} {'first':>8} {'others':>8} {'of trees':>10}")
    for project in projects():
        trees, totals = [], [frozen_total(store)]
        for number, tag in enumerate(project.tags[:tasks]):
            recipe = project.recipe(commit_of(mirrors / project.repository.replace("/", "__"), tag))
            trees.append(tree_size(build(recipe, store=store, name=f"{project.name}-{tag}", mirrors=mirrors)))
            if number == 0:
                totals.append(frozen_total(store))
        totals.append(frozen_total(store))
        first, others = (after - before for before, after in pairwise(totals))
        cells = " ".join(f"{number / MB:8.2f}" for number in (trees[0], first, others))
        print(f"{project.name:<11} {cells} {100 * others / max(sum(trees[1:]), 1):8.1f} %", flush=True)
    print(f"all of it: {frozen_total(store) / MB:.0f} MB")


def frozen_total(store: Store) -> int:
    """Freeze everything; return the bytes on disk of all but caches."""
    freeze(store, store.image_names())
    return sum(blocks(part) for part in store.root.iterdir() if part.name not in CACHES)


def projects() -> list[Project]:
    """Return the projects."""
    found = json.loads(FILE.read_text())
    return [
        Project(name, one["repository"], tuple(one["tags"]), tuple(one["requirements"])) for name, one in found.items()
    ]


def commit_of(repository: Path, tag: str) -> str:
    """Return the commit that a tag names."""
    done = run_git(["-C", str(repository), "rev-parse", "--verify", f"{tag}^{{commit}}"], timeout=60)
    done.check_returncode()
    return done.stdout.decode().strip()


def print_project(name: str, added: list[Counter[str]], trees: list[int]) -> None:
    """Print one line of the table."""
    own, rest = sum(one["own"] for one in added[1:]), sum(one["rest"] for one in added[1:])
    numbers = (trees[0], added[0].total(), own + rest, own, rest)
    cells = " ".join(f"{number / MB:8.2f}" for number in numbers)
    print(
        f"{name:<11} {cells} {100 * rest / max(sum(trees[1:]), 1):11.1f} %   load {os.getloadavg()[0]:.2f}", flush=True
    )


def tree_size(image: Image) -> int:
    """The bytes that a task's source takes on disk as files, without its repository."""
    with Sandbox.create(image.spec()) as box:
        found = box.exec(["find", ".", "-path", "./.git", "-prune", "-o", "-type", "f", "-printf", "%b\\n"]).check()
    return sum(map(int, found.stdout.split())) * 512


class Disk:
    """What is new in a store, every inode once.

    Args:
        store: the store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[int] = set()
        self._total = 0

    def grown(self) -> Counter[str]:
        """Return the bytes that are new: ``own``: changed files and objects, what was installed; and the ``rest``."""
        found: Counter[str] = Counter()
        # the names in layers before those in the pool
        parts = sorted(self._store.root.iterdir(), key=lambda path: (path.name == "objects", path.name))
        for path, info in (each for part in parts if part.name not in CACHES for each in walk(part)):
            if info.st_ino not in self._seen:
                self._seen.add(info.st_ino)
                found["own" if is_own(path, info) else "rest"] += info.st_blocks * 512
        self._total += found.total()
        return found

    def total(self) -> int:
        """Return the bytes of everything so far."""
        self.grown()
        return self._total


def is_own(path: str, info: os.stat_result) -> bool:
    """Whether something is a task's own content: a file of its tree that no other has, or git's copy of one."""
    if stat.S_ISDIR(info.st_mode) or "/layers/" not in path or "/tree/" not in path:
        return False
    return "/.git/" not in path or path.endswith(".pack")


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a directory or file and everything below it."""
    yield str(root), root.lstat()
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = f"{folder}/{name}"
            yield path, os.lstat(path)


def blocks(root: Path) -> int:
    """Return the bytes on disk of everything below a directory, every inode once."""
    return sum({info.st_ino: info.st_blocks * 512 for _, info in walk(root)}.values())


def measure_live(store: Store, images: dict[str, list[Image]]) -> None:
    """Print what forty live sandboxes, each of which has run its project's import, add to the disk."""
    before = blocks(store.root)
    boxes = [Sandbox.create(image.spec()) for some in images.values() for image in some]
    try:
        for box in boxes:
            box.exec(["bash", "-c", "git status --short && head -c 1000000 /dev/zero > new"]).check()
        used = blocks(store.root) - before
        print(
            f"{len(boxes)} live sandboxes, each with 1 MB written: {used} bytes of disk, what they write is in memory"
        )
    finally:
        for box in boxes:
            box.stop()


def measure_cold(images: dict[str, list[Image]]) -> None:
    """Time commands of new sandboxes with a warm and a cold page cache, in turns."""
    print(f"{'create and run':<42} {'warm':>9} {'cold':>9} {'ratio':>6}   (medians of the projects, ms)")
    for command in (
        ["true"],
        ["git", "status", "--short"],
        ["python", "-c", "pass"],
        ["python", "-c", "import {name}"],
    ):
        warm, cold = [], []
        for name, some in images.items():
            one = [word.format(name=name) for word in command]
            run(some[0], one)
            warm.append(run(some[0], one))
            drop_caches()
            cold.append(run(some[0], one))
        medians = statistics.median(warm) * 1e3, statistics.median(cold) * 1e3
        print(f"{' '.join(command):<42} {medians[0]:9.1f} {medians[1]:9.1f} {medians[1] / medians[0]:6.2f}", flush=True)


def run(image: Image, command: list[str]) -> float:
    """The seconds from asking for a sandbox to the end of its first command."""
    begun = time.perf_counter()
    with Sandbox.create(image.spec()) as box:
        box.exec(command).check()
        return time.perf_counter() - begun


def drop_caches() -> None:
    """Write back, then drop the page cache, names and inodes."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


if __name__ == "__main__":
    main()
