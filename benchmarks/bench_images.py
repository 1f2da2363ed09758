"""Build environments from a warm cache, beside `python -m venv` and pip; measure what further tasks take.

python benchmarks/bench_images.py [--rounds N]

Needs the package index once, and git. Both sides use the same interpreter, the same pins, caches that hold every file,
and compile byte code; they take turns. Ours makes one layer over the interpreter's, which is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from minisandbox.git import run_git
from minisandbox.images import Budget, build, build_all, find_interpreter
from minisandbox.spec import GitSource, PythonRecipe
from minisandbox.store import Store

PYTHON = "3.11"
FILE = Path(__file__).with_name("projects.json")
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(project["requirements"]) for name, project in json.loads(FILE.read_text()).items()
}
TASKS = 5
FILES, LINES = 1500, 150


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each environment is built (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        measure_environments(Path(directory), options.rounds)
        measure_tasks(Path(directory))


def measure_environments(directory: Path, rounds: int) -> None:
    """Build each environment both ways, in turns; then all of them at once."""
    store = Store.open(directory / "store")
    python = find_interpreter(PYTHON).executable
    print(f"{'environment':<14} {'ours':>8} {'venv + pip':>11} {'ratio':>6}   (medians of {rounds}, seconds)")
    totals = [0.0, 0.0]
    for name, pins in ENVIRONMENTS.items():
        ways = (partial(build_ours, store, name, pins), partial(build_venv, directory, python, name, pins))
        for way in ways:
            way()  # fills the caches
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for way, seconds in zip(ways, times, strict=True):
                forget(store, name)
                seconds.append(timed(way))
        ours, theirs = map(statistics.median, times)
        totals = [totals[0] + ours, totals[1] + theirs]
        print(f"{name:<14} {ours:8.2f} {theirs:11.2f} {ours / theirs:6.2f}   load {os.getloadavg()[0]:.2f}")
    print(f"{'all':<14} {totals[0]:8.2f} {totals[1]:11.2f} {totals[0] / totals[1]:6.2f}")
    for name in ENVIRONMENTS:
        forget(store, name)
    recipes = {name: partial(PythonRecipe, python=PYTHON, requirements=pins) for name, pins in ENVIRONMENTS.items()}
    together = timed(lambda: build_all(recipes, store=store, budget=Budget()))
    print(f"all at once    {together:8.2f}   {together / totals[1]:.2f} of venv + pip one after the other")


def build_ours(store: Store, name: str, pins: tuple[str, ...]) -> None:
    """Build an image with packages."""
    build(PythonRecipe(python=PYTHON, requirements=pins), store=store, name=name)


def forget(store: Store, name: str) -> None:
    """Remove the layer with an environment's packages; what was downloaded stays."""
    for record in store.images():
        if record.name == name:
            store.remove_unused_layer(record.layers[-1])


def build_venv(directory: Path, python: Path, name: str, pins: tuple[str, ...]) -> None:
    """Make a virtual environment and install with its pip, from pip's own cache."""
    place = directory / "venvs" / name
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    environment = {**os.environ, "PIP_CACHE_DIR": str(directory / "pip-cache")}
    subprocess.run(
        [place / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *pins],
        check=True,
        env=environment,
        stderr=subprocess.DEVNULL,
    )


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure_tasks(directory: Path) -> None:
    """Build tasks of one repository and print what each takes on disk, every inode once."""
    repository, commits, size = make_repository(directory)
    tree = sum(info.st_blocks * 512 for path, info in walk(repository) if path.suffix == ".py")
    places = [PythonRecipe(source=GitSource(str(repository), commit)) for commit in commits]
    bugs = [replace(places[0], patch=bug(number)) for number in range(TASKS)]
    print(f"\ntasks of one repository, every inode once; its tree has {size:,} bytes, and takes {tree:,} on disk")
    print(f"{'task':<34} {'on disk':>11} {'changed':>9} {'rest':>10} {'of the tree, on disk':>21}")
    for title, recipes in (("each at a commit of its own", places), ("bugs at one commit", bugs)):
        store, seen = Store.open(directory / title.replace(" ", "-")), set[int]()
        for number, recipe in enumerate(recipes):
            build(recipe, store=store, name=f"task{number}")
            changed, rest = added(store, seen)
            shares = f"{100 * rest / size:6.1f} %, {100 * rest / tree:6.1f} %"
            print(f"{title}, task {number + 1}: {changed + rest:>12,} {changed:>9,} {rest:>10,} {shares:>21}")


def added(store: Store, seen: set[int]) -> tuple[int, int]:
    """Return the bytes of new inodes in a store's layers: files of the tree and packs of objects, and the rest."""
    changed = rest = 0
    for path, info in walk(store.root / "layers"):
        if info.st_ino not in seen:
            seen.add(info.st_ino)
            own = path.suffix in (".py", ".pack")
            changed, rest = changed + own * info.st_blocks * 512, rest + (not own) * info.st_blocks * 512
    return changed, rest


def bug(number: int) -> str:
    """Return a patch that breaks one file of the first commit."""
    at = 7 + number * 101
    return (
        f"--- a/package{at % 30}/module{at}.py\n+++ b/package{at % 30}/module{at}.py\n"
        f"@@ -1,3 +1,3 @@\n def f{at}_0(x):\n-    return x + 0\n+    return x - 1\n def f{at}_1(x):\n"
    )


def make_repository(directory: Path) -> tuple[Path, list[str], int]:
    """Make a repository whose commits change three files each; return it, its commits and the size of its tree."""
    root = directory / "repository"
    root.mkdir()
    git(root, "init", "--quiet")
    for number in range(FILES):
        path = root / f"package{number % 30}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"def f{number}_{line}(x):\n    return x + {number * line}\n" for line in range(LINES)))
    commits = []
    for number in range(TASKS):
        for changed in range(3):
            at = (number * 211 + changed * 17) % FILES
            with (root / f"package{at % 30}" / f"module{at}.py").open("a") as file:
                file.write(f"# change {number}\n")
        git(root, "add", "--all")
        git(root, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "--quiet", "-m", "x")
        commits.append(git(root, "rev-parse", "HEAD"))
    return root, commits, sum(path.stat().st_size for path in root.rglob("*.py"))


def git(root: Path, *arguments: str) -> str:
    """Run git and return what it printed."""
    done = run_git(["-C", str(root), *arguments], timeout=120)
    done.check_returncode()
    return done.stdout.decode().strip()


def walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything below a directory."""
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            yield path, path.lstat()


if __name__ == "__main__":
    main()
