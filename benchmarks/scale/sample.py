"""Real layers, built by the product in a store of their own: what the count is fitted to and checked against."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scale.blocks import Ledger
from benchmarks.scale.environments import ByteCode, add_environment
from benchmarks.scale.index import MISSING, Contents, Index
from benchmarks.scale.measured import RECORDED, Measured
from benchmarks.scale.pins import Environment, Pin

from minisandbox.errors import InterpreterNotFound, MiniSandboxError
from minisandbox.images import build
from minisandbox.spec import PythonRecipe
from minisandbox.store import Store
from minisandbox.store.entries import FILE, Entry, read_entries
from minisandbox.store.records import LayerRecord

CHOSEN = (
    "django__django/14725",
    "django__django/16950",
    "mwaskom__seaborn/3069",
    "pallets__flask/5014",
    "psf__requests/5414",
    "pylint-dev__pylint/4551",
    "pylint-dev__pylint/4661",
    "pytest-dev__pytest/5787",
    "sphinx-doc__sphinx/7440",
    "sympy__sympy/13372",
    "arrow-py__arrow.1d70d009",
    "conan-io__conan.86f29e13",
    "pallets__flask.bc098406",
    "scrapy__scrapy.35212ec5",
)
"""Exports of several sizes and interpreters; one that is not there is passed over."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that was built.

    Attributes:
        record: what the store knows of it.
        entries: the names in it.
        list_bytes: what its list of files takes on disk.
    """

    record: LayerRecord
    entries: Sequence[Entry]
    list_bytes: int

    @property
    def kind(self) -> str:
        """The kind of step that made it."""
        return str(self.record.step.get("kind", "")) if isinstance(self.record.step, dict) else ""

    @property
    def requirements(self) -> frozenset[str]:
        """What was to be installed."""
        listed = self.record.step.get("requirements", ()) if isinstance(self.record.step, dict) else ()
        return frozenset(map(str, listed)) if isinstance(listed, list | tuple) else frozenset()


def sample(folder: Path, environments: Sequence[Environment], index: Index, say: Say) -> Measured:
    """Build environments and measure them; what is there from an earlier run is not built again.

    Args:
        folder: where the store is made.
        environments: those of both data sets.
        index: tells which pins can be had.
        say: prints a line.

    Returns:
        What was measured; recorded numbers where nothing was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(folder / "store")
    built: list[tuple[Environment, Mapping[Pin, Contents]]] = []
    for one in environments:
        if set(one.owners) & set(CHOSEN):
            contents = {pin: index.contents(pin, one.python) for pin in one.pins}
            if _build(store, one, contents, say):
                built.append((one, contents))
    for python in sorted({one.python for one in environments}):
        _build(store, Environment(python, frozenset(), (f"python{python}",)), {}, say)
    layers = list(read_layers(store))
    measured = fit(layers)
    check(built, layers, measured, say)
    return measured


def _build(store: Store, one: Environment, contents: Mapping[Pin, Contents], say: Say) -> bool:
    name = one.owners[0].replace("/", "-").replace(".", "-").lower()[:60]
    recipe = PythonRecipe(python=one.python, requirements=_lines(contents), complete=bool(contents))
    try:
        build(recipe, store=store, name=name)
    except InterpreterNotFound:
        say(f"{name}: this machine has no Python {one.python}")
        return False
    except MiniSandboxError as error:
        say(f"{name}: not built: {error}")
        return False
    return True


def _lines(contents: Mapping[Pin, Contents]) -> tuple[str, ...]:
    return tuple(f"{pin.name}=={pin.version}" for pin in sorted(contents) if contents[pin].kind != MISSING)


def read_layers(store: Store) -> Iterator[Layer]:
    """Yield a store's layers."""
    for folder in sorted((store.root / "layers").iterdir()):
        listed = folder / "files.gz"
        record = LayerRecord.read(store.root, f"layers/{folder.name}/layer.json")
        yield Layer(record, list(read_entries(folder)), listed.lstat().st_blocks * 512)


def fit(layers: Sequence[Layer]) -> Measured:
    """Fit what no list of files tells: byte code's size by a line for each interpreter, interpreters' own size."""
    pairs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    prefixes: dict[str, int] = {}
    for layer in layers:
        sizes = {entry.path: entry.size for entry in layer.entries}
        for path, size in sizes.items():
            source, python = source_of(path)
            if python and source in sizes:
                pairs[python].append((sizes[source], size))
        if layer.kind == "python_copy" and isinstance(layer.record.step, dict):
            python = ".".join(str(layer.record.step["version"]).split(".")[:2])
            prefixes[python] = layer.record.bytes
    lines = {python: line(each) for python, each in pairs.items() if len(each) > 100}
    return replace(RECORDED, bytecode={**RECORDED.bytecode, **lines}, prefixes={**RECORDED.prefixes, **prefixes})


def line(pairs: Sequence[tuple[int, int]]) -> ByteCode:
    """Fit a line to sizes of sources and of their byte code, by least squares."""
    found = statistics.linear_regression([source for source, _ in pairs], [code for _, code in pairs])
    return ByteCode(round(found.intercept), round(found.slope, 3))


def source_of(path: str) -> tuple[str, str]:
    """The source and the interpreter of byte code: ``a/__pycache__/b.cpython-39.pyc`` is of ``a/b.py``, by "3.9"."""
    folder, _, name = path.rpartition("/")
    stem, _, tag = name.removesuffix(".pyc").rpartition(".cpython-3")
    if not stem or not name.endswith(".pyc") or not tag.isdecimal():
        return "", ""
    return f"{folder.removesuffix('__pycache__')}{stem}.py", f"3.{tag}"


def check(
    built: Sequence[tuple[Environment, Mapping[Pin, Contents]]],
    layers: Sequence[Layer],
    measured: Measured,
    say: Say,
) -> None:
    """Print what was counted of the environments that were built, beside what their layers take."""
    ledger = Ledger()
    wanted = set()
    for one, contents in built:
        add_environment(ledger, one, contents, measured.bytecode_of(one.python))
        wanted.add(frozenset(_lines(contents)))
    inodes: dict[str, int] = {}
    rest = apart = 0
    for layer in layers:
        if layer.requirements in wanted:
            rest += layer.list_bytes
            for entry in layer.entries:
                if entry.kind == FILE and entry.object_name:
                    inodes[entry.object_name] = entry.disk
                    apart += entry.disk
                elif not entry.same:
                    rest += entry.disk
    files, counted = sum(inodes.values()), ledger.files("packages")
    told, names = ledger.directories["packages"] + ledger.lists["packages"], ledger.inodes("packages")
    say(f"{len(built)} environments: {_mb(files)} in {len(inodes):,} inodes; counted {_mb(counted)} in {names:,}")
    say(f"without sharing {_mb(apart)}; counted {_mb(ledger.names['packages'])}")
    say(f"directories and lists {_mb(rest)}; counted {_mb(told)}")
    say(f"byte code at one path of equal sources: {shared_bytecode(layers):.1%} is one inode in all that have it")


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def shared_bytecode(layers: Sequence[Layer]) -> float:
    """The share of byte code that is one inode in all layers where its path and its source are the same."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for layer in layers:
        if layer.kind != "requirements":
            continue
        digests = {entry.path: entry.digest for entry in layer.entries if entry.kind == FILE}
        for entry in layer.entries:
            source, python = source_of(entry.path)
            if python and source in digests:
                found[entry.path, digests[source]].append(entry.digest)
    several = [digests for digests in found.values() if len(digests) > 1]
    return sum(len(set(digests)) == 1 for digests in several) / max(len(several), 1)
