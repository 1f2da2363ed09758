"""The parts of a store for a whole data set, each with how it was found and how wrong it may be."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.scale.blocks import Ledger, on_disk
from benchmarks.scale.environments import BYTECODE, add_environment, compiled, place
from benchmarks.scale.index import MISSING, NEAR, SDIST, WHEEL, Contents, Index, look_up
from benchmarks.scale.layers import OBJECTS, SOURCE, TASK, add_objects, add_source, add_task
from benchmarks.scale.measured import Measured
from benchmarks.scale.pins import Environment, Pin
from benchmarks.scale.tasks import (
    add_rows,
    bug_bytes,
    commit_of,
    find_mirror,
    mirror_bytes,
    read_rows,
    repository_of,
)
from benchmarks.scale.trees import Repository

from minisandbox.images.python.torch_builds import is_cuda

EXACT, MEASURED, ESTIMATED, RECORDED = "exact", "measured", "estimated", "recorded"

_GPU = ("cuda", "cusparse", "cudnn", "cublas", "nccl", "cupti", "nvrtc", "nvToolsExt")

_KINDS = {
    SOURCE: "sources",
    OBJECTS: "git objects that a repository's tasks share",
    TASK: "git objects and index of each task",
    "tests": "hidden tests",
}

STEPS = {SOURCE: "git", OBJECTS: "repository", TASK: "task", "tests": "tests"}
"""Which step makes the layers of each kind."""

Say = Callable[[str], None]
Looked = Mapping[tuple[Pin, str], Contents]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the store.

    Attributes:
        title: what it is.
        bytes: what it takes on disk.
        how: how it was found.
        unsure: how many bytes it may be off, either way.
        cuda: how many of the bytes are CUDA libraries.
        frozen: what it takes where its layers are frozen.
        frozen_cuda: how many bytes of that are CUDA libraries.
    """

    title: str
    bytes: float
    how: str
    unsure: float = 0.0
    cuda: float = 0.0
    frozen: float = 0.0
    frozen_cuda: float = 0.0


@dataclass(slots=True)
class Survey:
    """What was found of one data set.

    Attributes:
        parts: what the images need.
        further: what may lie in the store besides, and need not.
        savings: what would make it smaller, and by how much.
        notes: counts, line by line.
    """

    parts: list[Part] = field(default_factory=list)
    further: list[Part] = field(default_factory=list)
    savings: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Bytes of all that images need."""
        return sum(part.bytes for part in self.parts)

    @property
    def cuda(self) -> float:
        """Bytes of CUDA libraries in it."""
        return sum(part.cuda for part in self.parts)

    @property
    def frozen(self) -> float:
        """Bytes of all that images need, where all of them are frozen."""
        return sum(part.frozen for part in self.parts)

    @property
    def frozen_cuda(self) -> float:
        """Bytes of CUDA libraries in that."""
        return sum(part.frozen_cuda for part in self.parts)

    @property
    def unsure(self) -> float:
        """How many bytes the total may be off, if every part is off the same way."""
        return sum(part.unsure for part in self.parts)

    def note(self, text: str) -> None:
        """Add a line."""
        self.notes.append(text)

    def add_packages(self, environments: Sequence[Environment], index: Index, measured: Measured, say: Say) -> None:
        """Add interpreters and environments; the downloads besides."""
        wanted = sorted({(pin, one.python) for one in environments for pin in one.pins})
        began = time.monotonic()

        def show(number: int) -> None:
            say(f"{number} of {len(wanted)} pins looked up, {time.monotonic() - began:.0f} s")

        looked: Looked = dict(zip(wanted, look_up(index, wanted, show), strict=True))
        lean: Looked = {(pin, python): without_cuda(pin.name, one) for (pin, python), one in looked.items()}
        ledger = counted(environments, looked, measured)
        self._add_interpreters({one.python for one in environments}, measured)
        self._add_package_parts(ledger, counted(environments, lean, measured), looked, measured)
        self._note_cuda(environments, looked)
        self._note_pins(environments, looked)
        self._note_sharing(environments, looked, ledger, measured)

    def _add_interpreters(self, pythons: Iterable[str], measured: Measured) -> None:
        sizes = {python: measured.prefix_of(python) for python in pythons}
        other = sum(size for python, size in sizes.items() if python not in measured.prefixes)
        title = f"interpreters, one of each of {len(sizes)} minor versions"
        size = sum(sizes.values())
        self.parts.append(Part(title, size, MEASURED, 0.2 * other, frozen=size * measured.blobs["python_copy"]))

    def _add_package_parts(self, ledger: Ledger, lean: Ledger, looked: Looked, measured: Measured) -> None:
        guessed = sum(taken(one, python, measured) for (_, python), one in looked.items() if one.kind in (NEAR, SDIST))
        found = [taken(one, python, measured) for (_, python), one in looked.items() if one.kind == WHEEL]
        missing = sum(one.kind == MISSING for one in looked.values())
        code, lean_code = bytecode_bytes(ledger), bytecode_bytes(lean)
        files, lean_files = ledger.files("packages") - code, lean.files("packages") - lean_code
        rest = ledger.overhead("packages")
        mean = statistics.fmean(found) if found else 0.0
        apart = unshared(ledger, "packages")
        ratios = {kind: ratio * apart for kind, ratio in measured.blobs.items()}
        cuda = (files - lean_files) * cuda_ratio(looked) * apart
        left, lists = ledger.lists["packages"], ledger.lists["packages"] - lean.lists["packages"]
        self.parts += [
            Part("files of packages, from wheels' own lists", files, EXACT, 0.5 * guessed, files - lean_files,
                 lean_files * ratios["requirements"] + cuda, cuda),
            Part("their byte code", code, MEASURED, 0.03 * code, code - lean_code, code * ratios[BYTECODE],
                 (code - lean_code) * ratios[BYTECODE]),
            Part(f"{missing} pins that are not on the index, at the mean of those that are", mean * missing, ESTIMATED,
                 mean * missing, frozen=mean * missing * ratios["requirements"]),
            Part("directories, lists and names in the pool of environments", rest, EXACT, 0.1 * rest,
                 rest - lean.overhead("packages"), left, lists),
        ]  # fmt: skip
        sizes = {one.file: one.size for one in looked.values() if one.file}
        self.further.append(Part(f"downloads: {len(sizes)} wheels and archives", sum(sizes.values()), EXACT))
        self._add_savings(looked)

    def _note_cuda(self, environments: Sequence[Environment], looked: Looked) -> None:
        found = [one for one in environments if any(gpu_bytes(pin.name, looked[pin, one.python]) for pin in one.pins)]
        if found:
            owners = ", ".join(owner for one in found for owner in one.owners)
            self.note(f"{len(found)} environments have CUDA libraries: {owners}")

    def _add_savings(self, looked: Looked) -> None:
        """What builds of packages without CUDA would save."""
        gpu = {one.file: gpu_bytes(pin.name, one) for (pin, _), one in looked.items()}
        saved = sum(gpu.values())
        title = "builds of packages without CUDA, before equal files count once"
        self.savings.append(Part(title, saved, ESTIMATED, 0.1 * saved, frozen=saved * cuda_ratio(looked)))

    def _note_pins(self, environments: Sequence[Environment], looked: Looked) -> None:
        kinds = Counter(one.kind for one in looked.values())
        exports = sum(len(one.owners) for one in environments)
        pythons = Counter(one.python for one in environments)
        distributions, versions = {pin.name for pin, _ in looked}, {pin for pin, _ in looked}
        skipped = sum(one.skipped * len(one.owners) for one in environments) / exports
        counted = ", ".join(f"{count} with {python}" for python, count in pythons.most_common())
        self.note(f"{exports} exports, {len(environments)} different ones: {counted}")
        self.note(f"{len(distributions)} distributions, {len(versions)} versions, {len(looked)} with interpreters")
        self.note(f"{kinds[WHEEL]} of these have a wheel, whose list of files is exact; {kinds[NEAR]} only a source "
                  "archive, counted by the wheel of the nearest interpreter; "
                  f"{kinds[SDIST]} by the packages in the archive; {kinds[MISSING]} are not on the index")  # fmt: skip
        self.note(
            f"{skipped:.0f} entries of an export are conda packages that are no Python distributions: not installed"
        )

    def _note_sharing(
        self, environments: Sequence[Environment], looked: Looked, ledger: Ledger, measured: Measured
    ) -> None:
        once = sum(taken(one, python, measured) for (_, python), one in looked.items())
        apart = sum(taken(looked[pin, one.python], one.python, measured) * len(one.owners)
                    for one in environments for pin in one.pins)  # fmt: skip
        files, count = ledger.files("packages"), ledger.inodes("packages")
        different = ledger.names["packages"]
        self.note(f"packages for each export by itself {_gb(apart)}, for each different one {_gb(different)}")
        self.note(f"each (distribution, version, interpreter) once {_gb(once)}, equal files once {_gb(files)} in "
                  f"{count:,} inodes")  # fmt: skip
        self.note("largest, before equal files count once: " + ", ".join(largest(environments, looked, measured)))

    def add_recorded(self, sources: int) -> None:
        """Add what another run counted of the sources of all tasks."""
        self.parts.append(
            Part(
                "sources, repositories inside, hidden tests, built files",
                sources,
                RECORDED,
                0.2 * sources,
                frozen=0.4 * sources,
            )
        )

    def add_rows(self, rows: Path, mirrors: Path, cache: Path, count: int, measured: Measured, say: Say) -> None:
        """Add sources, repositories, hidden tests and built files of SWE-bench's tasks.

        Args:
            rows: the tasks, JSON lines.
            mirrors: the repositories.
            cache: where compressed sizes are kept.
            count: how many tasks the data set has; those without a row count as the mean of those with one.
            measured: what building leaves.
            say: shows progress.
        """
        ledger, absent, known = Ledger(), 0, read_rows(rows)
        for there in add_rows(ledger, known, mirrors, cache, say):
            absent += not there
        factor = count / (len(known) - absent)
        for kind, title in _KINDS.items():
            times = 1.0 if kind == OBJECTS else factor
            files, rest = ledger.files(kind), ledger.overhead(kind)
            self.parts += [
                Part(f"{title}: files", files * times, EXACT, files * (times - 1),
                     frozen=ledger.names[kind] * times * measured.blobs[STEPS[kind]]),
                Part(f"{title}: directories, lists, names", rest * times, EXACT, rest * (times - 1 + 0.1),
                     frozen=ledger.lists[kind] * times),
            ]  # fmt: skip
        self.note(
            f"{len(known)} rows, {absent} without their commit in the mirrors; times {factor:.3f} for {count} tasks"
        )
        apart, packs = (ledger.names[kind] * factor for kind in (SOURCE, TASK))
        self.note(f"files of sources without sharing {_gb(apart)}, of tasks {_gb(packs)}")
        repos = Counter(row.repo for row in known)
        each = {repo: measured.installed_of(repo) + measured.built_of(repo) for repo in repos}
        left = sum(each[repo] * number * factor for repo, number in repos.items())
        packed = left * measured.blobs["install"]
        title = "what installing leaves: built files, metadata"
        self.parts.append(Part(title, left, ESTIMATED, 0.5 * left, frozen=packed))
        self.further.append(_mirrors(mirrors, repos))

    def add_repositories(
        self, environments: Sequence[Environment], mirrors: Path, cache: Path, count: int, measured: Measured, say: Say
    ) -> None:
        """Add the source and the clean repository of each of SWE-smith's; a layer for each bug besides."""
        owners = sorted(owner for one in environments for owner in one.owners)
        sizes: list[int] = []
        frozen: list[float] = []
        bugs: list[float] = []
        exact = 0
        for number, owner in enumerate(owners, 1):
            say(f"{owner}: {number} of {len(owners)}")
            path = find_mirror(mirrors, repository_of(owner))
            if path is None:
                continue
            repository = Repository(path, cache / f"{repository_of(owner).replace('/', '__')}.json.gz")
            commit = repository.resolve(commit_of(owner))
            exact += commit is not None
            ledger, objects = Ledger(), repository.tree(commit or "HEAD")
            add_source(ledger, objects)
            add_objects(ledger, repository, objects)
            add_task(ledger, repository, objects, objects, owner)
            sizes.append(ledger.total(SOURCE) + ledger.total(OBJECTS) + ledger.total(TASK))
            frozen.append(sum(frozen_bytes(ledger, kind, measured) for kind in (SOURCE, OBJECTS, TASK)))
            bugs.append(bug_bytes(repository, objects, number))
        self._add_repository_parts(owners, sizes, frozen, bugs, count, measured)
        self.note(
            f"{len(sizes)} of {len(owners)} repositories looked into: {exact} at their commit, the others at another"
        )

    def _add_repository_parts(
        self,
        owners: Sequence[str],
        sizes: Sequence[int],
        frozen: Sequence[float],
        bugs: Sequence[float],
        count: int,
        measured: Measured,
    ) -> None:
        mean, error = _mean(sizes)
        packed, _ = _mean(frozen)
        rest = len(owners) - len(sizes)
        built = sum(measured.installed_of(repo) + measured.built_of(repo) for repo in map(repository_of, owners))
        self.parts += [
            Part(f"source and repository of {len(sizes)} repositories", sum(sizes), EXACT, 0.05 * sum(sizes),
                 frozen=sum(frozen)),
            Part(f"the same of {rest} more, at the mean of those", mean * rest, ESTIMATED, 2 * error * rest,
                 frozen=packed * rest),
            Part("what installing leaves", built, ESTIMATED, 0.5 * built, frozen=built * measured.blobs["install"]),
        ]  # fmt: skip
        each, error = _mean(bugs)
        title = f"a layer for each of {count:,} bugs, all kept at once ({each / 1e3:.0f} kB each)"
        self.further.append(Part(title, each * count, ESTIMATED, 2 * error * count))


def frozen_bytes(ledger: Ledger, kind: str, measured: Measured) -> float:
    """Return what layers of a kind take where they are frozen: blobs, each for itself, and their lists."""
    return ledger.names[kind] * measured.blobs[STEPS[kind]] + ledger.lists[kind]


def unshared(ledger: Ledger, kind: str) -> float:
    """Return how often the files of a kind of layer are there, on average: every blob has its own."""
    return ledger.names[kind] / max(ledger.files(kind), 1)


def cuda_ratio(looked: Looked) -> float:
    """Return what wheels take of the blocks of their CUDA libraries: blobs take no more."""
    whole: dict[str, tuple[float, float]] = {}
    for (pin, _), one in looked.items():
        if one.file and (size := gpu_bytes(pin.name, one)):
            unpacked = sum(on_disk(length) for _, _, length, _ in one.members)
            whole[one.file] = size, one.size * size / unpacked
    return sum(packed for _, packed in whole.values()) / max(sum(size for size, _ in whole.values()), 1)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    if len(values) < 2:
        return (values[0] if values else 0.0), 0.0
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def _mirrors(mirrors: Path, repos: Iterable[str]) -> Part:
    sizes: defaultdict[str, int] = defaultdict(int)
    for repo in repos:
        path = find_mirror(mirrors, repo)
        if path is not None:
            sizes[repo] = mirror_bytes(path)
    return Part(f"mirrors of {len(sizes)} repositories, with all their history", sum(sizes.values()), MEASURED)


def largest(environments: Sequence[Environment], looked: Looked, measured: Measured, count: int = 8) -> Iterator[str]:
    """Yield the distributions that take most, with how many versions and environments have them."""
    sizes: Counter[str] = Counter()
    users: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for (pin, python), contents in looked.items():
        sizes[family(pin.name)] += taken(contents, python, measured)
    for one in environments:
        for pin in one.pins:
            users[family(pin.name)].add(one.owners)
    for name, size in sizes.most_common(count):
        yield f"{name} {size / 1e9:.2f} GB ({len(users[name])} environments)"


def family(name: str) -> str:
    """The name by which a distribution is counted among the largest: CUDA comes as a dozen of them."""
    return "nvidia-*" if name.startswith("nvidia-") else name


def gpu_bytes(name: str, contents: Contents) -> int:
    """What of a distribution is for GPUs alone."""
    return sum(on_disk(size) for path, _, size, _ in contents.members if _is_cuda(name, path))


def _is_cuda(name: str, path: str) -> bool:
    if is_cuda(name):
        return True
    return name == "torch" and any(word in path.rpartition("/")[2] for word in _GPU)


def without_cuda(name: str, contents: Contents) -> Contents:
    """What a build of a distribution for the CPU would be, nearly: its other files are taken to be the same.

    So counted torch 2.5.1, 2.6.0 and 2.7.1 take 558 to 578 MB; a wheel of 2.13.0+cpu takes 592 without its tests.
    """
    kept = tuple(member for member in contents.members if not _is_cuda(name, member[0]))
    return replace(contents, members=kept)


def counted(environments: Sequence[Environment], looked: Looked, measured: Measured) -> Ledger:
    """Count the layers of all environments."""
    ledger = Ledger()
    for one in environments:
        contents = {pin: looked[pin, one.python] for pin in one.pins}
        add_environment(ledger, one, contents, measured.bytecode_of(one.python))
    return ledger


def bytecode_bytes(ledger: Ledger) -> int:
    """What byte code takes among packages."""
    return sum(
        on_disk(size) * count
        for key, (size, count) in ledger.shared["packages"].items()
        if isinstance(key, tuple) and key[0] == BYTECODE
    )


def taken(contents: Contents, python: str, measured: Measured) -> int:
    """What an installation takes by itself: files and byte code, in blocks."""
    placed = place(contents)
    code = compiled(placed, python, measured.bytecode_of(python))
    return sum(on_disk(one.size) for one in (*placed, *code))
