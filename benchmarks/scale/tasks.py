"""What the tasks of a data set take beyond their environments: sources, repositories, hidden tests, injected bugs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scale.blocks import Ledger, directory_bytes
from benchmarks.scale.trees import Object, Repository, add_repository, add_source

from minisandbox.patches import parse_patch

_LINE = 40
_DRAWN = 12
"""Files of a repository that a bug is tried in, one after the other."""


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
    """Count the layers of tasks: source, hidden tests, repository; yield for each whether its commit is there."""
    found: dict[str, Repository | None] = {}
    for number, row in enumerate(sorted(rows, key=lambda one: (one.repo, one.commit)), 1):
        if row.repo not in found:
            path = find_mirror(mirrors, row.repo)
            kept = cache / f"{row.repo.replace('/', '__')}.json.gz"
            found[row.repo] = None if path is None else Repository(path, kept)
        repository = found[row.repo]
        commit = repository.resolve(row.commit) if repository is not None else None
        progress(f"sources: {row.repo} {number} of {len(rows)}")
        objects = repository.tree(commit) if repository is not None and commit is not None else []
        if repository is not None and objects:
            add_source(ledger, objects)
            add_repository(ledger, repository, objects, row.name)
            add_tests(ledger, row, objects)
        yield bool(objects)


def add_tests(ledger: Ledger, row: Row, objects: Sequence[Object]) -> None:
    """Count the layer of a task's hidden tests: the files that the test patch touches, with it applied."""
    sizes = {one.path: one.size for one in objects}
    changes = {change.path: change.added * _LINE for change in parse_patch(row.test_patch)}
    files = [(("test", row.name, path), max(sizes.get(path, 0) + new, 1), 1) for path, new in changes.items()]
    folders = {part for path in changes for part in _parents(path)}
    ledger.add_layer("tests", files, (len(folders) + 1) * directory_bytes(()), len(files) + len(folders))


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def bug_bytes(ledger: Ledger, repository: Repository, objects: list[Object], seed: int) -> float:
    """Return the bytes that a further task of a repository takes: one source file is another one.

    Args:
        ledger: has the clean task's layer already.
        repository: where the objects are.
        objects: of the clean tree.
        seed: decides which files change.
    """
    sources = [one for one in objects if one.path.endswith(".py") and one.size > 300 and "test" not in one.path]
    if not sources:
        return 0.0
    chance = random.Random(seed)
    before = ledger.total("repository")
    for number in range(_DRAWN):
        one = chance.choice(sources)
        changed = changed_objects(objects, one.path, f"{seed:04x}{number:02x}")
        repository.packed |= {
            new.name: repository.packed[old.name]
            for old, new in zip(objects, changed, strict=True)
            if new.name != old.name
        }
        add_repository(ledger, repository, changed, f"{seed} bug {number}")
        ledger.add_layer("bug", [(("bug", seed, number), one.size, 1)], 0, 0)
    in_place = 3 * directory_bytes(())  # copied up: the directories above the file
    return (ledger.total("repository") - before) / _DRAWN + ledger.files("bug") / ledger.layers["bug"] + in_place


def changed_objects(objects: Sequence[Object], path: str, mark: str) -> list[Object]:
    """Return a tree in which one file has another content: it and the directories above it have other names."""
    above = {path, "", *_parents(path)}
    chance = random.Random(mark)
    return [replace(one, name=f"{chance.getrandbits(160):040x}") if one.path in above else one for one in objects]


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
