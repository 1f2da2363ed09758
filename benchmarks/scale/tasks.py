"""What the tasks of a data set take beyond their environments: sources, repositories, hidden tests, injected bugs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.scale.blocks import BLOCK, Ledger, directory_bytes
from benchmarks.scale.layers import TASK, add_objects, add_source, add_task, parents
from benchmarks.scale.trees import Object, Repository

from minisandbox.patches import parse_patch

_LINE = 40
_SMALL = 300
_HIDDEN = 3
"""Test files that a bug hides: 3.3 on the mean of 600 bugs of three repositories."""
_IMAGE = 3 * BLOCK  # an image's record, the logs of its two steps
_TEST = re.compile(r"(^|/)test_[^/]*\.py$|_test\.py$")
_DRAWN = 12
"""Further files of a repository that a bug is tried in, one after the other."""


@dataclass(frozen=True, slots=True)
class Row:
    """A task of SWE-bench, as far as its size goes.

    Attributes:
        name: its instance_id.
        repo: OWNER/NAME.
        commit: its base commit.
        test_patch: the hidden tests.
    """

    name: str
    repo: str
    commit: str
    test_patch: str


def read_rows(path: Path) -> list[Row]:
    """Read the rows of SWE-bench (JSON lines).

    Raises:
        OSError: the file cannot be read.
        KeyError: a row lacks a field.
    """
    rows = (json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip())
    return [Row(row["instance_id"], row["repo"], row["base_commit"], row["test_patch"]) for row in rows]


def find_mirror(mirrors: Path, repo: str) -> Path | None:
    """Return the git directory of a repository: OWNER+NAME, OWNER__NAME, or a benchmark's mirror called so."""
    owner, _, name = repo.partition("/")
    for folder in (f"{owner}+{name}", f"{owner}__{name}", *(path.name for path in mirrors.glob(f"*+{owner}__{name}*"))):
        for place in (mirrors / folder / "repo", mirrors / folder / "repo/.git", mirrors / folder):
            if (place / "HEAD").is_file():
                return place
    return None


def add_rows(
    ledger: Ledger, rows: Sequence[Row], mirrors: Path, cache: Path, progress: Callable[[str], None]
) -> Iterator[bool]:
    """Count the layers of tasks: source, repository, hidden tests; yield for each whether its commit is there."""
    found: dict[str, _Commits | None] = {}
    for number, row in enumerate(rows, 1):
        if row.repo not in found:
            path = find_mirror(mirrors, row.repo)
            kept = cache / f"{row.repo.replace('/', '__')}.json.gz"
            found[row.repo] = None if path is None else _Commits(Repository(path, kept))
        commits = found[row.repo]
        progress(f"sources: {row.repo} {number} of {len(rows)}")
        objects = commits.add(ledger, row) if commits is not None else None
        if objects is not None:
            add_tests(ledger, row, objects)
        yield objects is not None


@dataclass(slots=True)
class _Commits:
    """The commits of one repository that were counted.

    Attributes:
        repository: where their objects are.
        sources: the names of those whose source and objects have been counted.
    """

    repository: Repository
    sources: set[str] = field(default_factory=set)

    def add(self, ledger: Ledger, row: Row) -> list[Object] | None:
        """Count a task; return its tree, or None if its commit is not there."""
        commit = self.repository.resolve(row.commit)
        if commit is None:
            return None
        objects = self.repository.tree(commit)
        if commit not in self.sources:
            add_source(ledger, objects)
            add_objects(ledger, self.repository, objects)
        self.sources.add(commit)
        add_task(ledger, self.repository, objects, objects, row.name)
        return objects


def add_tests(ledger: Ledger, row: Row, objects: Sequence[Object]) -> None:
    """Count the layer of a task's hidden tests: the files that the test patch touches, with it applied."""
    sizes = {one.path: one.size for one in objects}
    changes = {change.path: len(list(change.signed(b"+"))) * _LINE for change in parse_patch(row.test_patch)}
    files = [(("test", row.name, path), max(sizes.get(path, 0) + new, 1), 1) for path, new in changes.items()]
    folders = {part for path in changes for part in parents(path)}
    ledger.add_layer("tests", files, (len(folders) + 1) * directory_bytes(()), len(files) + len(folders))


def bug_bytes(repository: Repository, objects: list[Object], seed: int) -> float:
    """Return the bytes that a bug of a repository takes: one source file is another one, some test files are hidden.

    Args:
        repository: where the objects are.
        objects: of the clean tree.
        seed: decides which files.
    """
    sources = [one for one in objects if one.path.endswith(".py") and one.size > _SMALL and "test" not in one.path]
    tests = [one for one in objects if _TEST.search(one.path)]
    if not sources:
        return 0.0
    chance = random.Random(seed)
    ledger, first = Ledger(), 0
    for number in range(_DRAWN + 1):
        one, hidden = chance.choice(sources), chance.sample(tests, min(_HIDDEN, len(tests)))
        hides = [test.path for test in hidden]
        changed = changed_objects(objects, one.path, f"{seed:04x}{number:02x}", hides)
        _add_bug(ledger, repository, objects, changed, f"{seed} bug {number}")
        copied = {folder for path in (one.path, *hides) for folder in parents(path)}
        ledger.directories[TASK] += len(copied) * directory_bytes(())
        ledger.add_layer("file", [(number, one.size, 1)], 0, 0)
        _add_hidden(ledger, hidden)
        first = first or _bugs_total(ledger)  # what it has in common with the others is no further bug's
    return (_bugs_total(ledger) - first) / _DRAWN + _IMAGE


def _bugs_total(ledger: Ledger) -> int:
    return ledger.total(TASK) + ledger.files("file") + ledger.total("hidden")


def _add_hidden(ledger: Ledger, tests: Sequence[Object]) -> None:
    above = {folder for test in tests for folder in parents(test.path)}
    files = [(test.path, test.size, 1) for test in tests]
    ledger.add_layer("hidden", files, (len(above) + 1) * directory_bytes(()), len(files) + len(above) + 1)


def _add_bug(
    ledger: Ledger, repository: Repository, objects: Sequence[Object], changed: Sequence[Object], task: str
) -> None:
    old = {one.path: one.name for one in objects}
    for one in changed:
        if one.name != old[one.path]:
            for sizes in repository.sizes.values():
                if old[one.path] in sizes:
                    sizes[one.name] = sizes[old[one.path]]
    add_task(ledger, repository, changed, objects, task)


def changed_objects(objects: Sequence[Object], path: str, mark: str, hidden: Sequence[str] = ()) -> list[Object]:
    """Return a tree in which one file has another content, and some are not there.

    These files and the directories above them have other names.
    """
    above = {path, "", *parents(path), *(folder for one in hidden for folder in parents(one))}
    chance = random.Random(mark)
    return [
        replace(one, name=f"{chance.getrandbits(160):040x}") if one.path in above else one
        for one in objects
        if one.path not in hidden
    ]


def mirror_bytes(path: Path) -> int:
    """Bytes on disk of a repository's objects."""
    return sum(file.lstat().st_blocks * 512 for file in (path / "objects").rglob("*") if file.is_file())


def repository_of(owner: str) -> str:
    """The repository of an export: ``pallets__flask/5014`` and ``pallets__flask.bc098406`` are of pallets/flask."""
    head = owner.partition("/")[0]
    plain, dot, commit = head.rpartition(".")
    name = plain if dot and len(commit) == 8 else head
    return name.replace("__", "/", 1)


def commit_of(owner: str) -> str:
    """The beginning of the commit in the name of an export of SWE-smith."""
    return owner.partition("/")[0].rpartition(".")[2]
