"""Write editions: test files in which each test has several versions, some of them changed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from minisandbox.grade.confirm.edits import Edit, PythonSource, Sources, apply_edits
from minisandbox.grade.confirm.variants import Variant
from minisandbox.grade.judging import SuiteRun
from minisandbox.grade.names import first_words
from minisandbox.tasks import node_id

Change = tuple[Variant, int]
"""A variant and the index of its replacement text; -1 stands for the unchanged value."""
Changes = tuple[Change, ...]
"""The changes of one version of a test. An unchanged version may have values in place of names, but no other change."""
_LETTERS = "abcdefghilmnoprstu"


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a test.

    Attributes:
        original: the pytest id of the test, without parameters.
        test: the version's own id: that of the original, or of a copy.
        changes: the version's edits.
    """

    original: str
    test: str
    changes: Changes

    @property
    def is_changed(self) -> bool:
        """Whether the version has another expectation than the original."""
        return any(index >= 0 for _, index in self.changes)


@dataclass(frozen=True, slots=True)
class Edition:
    """Edited test files, and the versions of tests in them.

    Attributes:
        files: the contents of the edited files, by path.
        versions: the tests in the files.
    """

    files: Mapping[str, bytes]
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The result of a test with one set of parameters.

    Attributes:
        outcome: the outcome, as in a report.
        test: the item's name in the runner's output.
        line: the line of the test's file at which it failed, or None.
        place: the position of the failure in the test; "" if it is unknown.
    """

    outcome: str
    test: str
    line: int | None
    place: str = ""


def make_edition(
    files: Mapping[str, bytes],
    requested: Mapping[str, Sequence[Changes]],
    rng: random.Random,
    definitions: Sequence[Change] = (),
) -> Edition:
    """Write versions of tests into their files.

    Args:
        files: the contents of the test files, by path.
        requested: the versions of each test. The first keeps the test's own name, the others become copies below it.
            Tests that inherit one method have the same versions.
        rng: the random generator that names the copies.
        definitions: new values for the definitions of variables that no version reads any more.

    Returns:
        The edition, without copies that cannot be created and without files that would be malformed.
    """
    edits: dict[str, list[Edit]] = {}
    versions: list[Version] = []
    copy_names: dict[int, list[str | None]] = {}
    sources = Sources(files)
    used_names: dict[str, set[str]] = {}
    for test, version_changes in requested.items():
        if (parsed := sources.find(test)) is None:
            continue
        path, (source, function) = test.partition("::")[0], parsed
        names = used_names.setdefault(path, {other.name for _, other in source.functions()})
        if id(function) not in copy_names:
            for variant, index in version_changes[0]:
                edits.setdefault(variant.path, []).append(variant.edit(index))
            copy_names[id(function)] = [function.name]
            for changes in version_changes[1:]:
                copy_name = _new_name(function.name, names, rng)
                copy = source.copied(function, copy_name, [variant.edit(index) for variant, index in changes])
                copy_names[id(function)].append(copy_name if copy else None)
                edits.setdefault(path, []).extend([copy] if copy else [])
        prefix = test.removesuffix(function.name)
        named_changes = zip(copy_names[id(function)], version_changes, strict=True)
        versions += [Version(test, prefix + name, changes) for name, changes in named_changes if name]
    edited = {path: apply_edits(files[path], changes) for path, changes in edits.items()}
    for path, content in edited.items():
        edited[path] = _with_definitions(files[path], content, edits[path], versions, path, definitions)
    malformed = {path for path, content in edited.items() if path.endswith(".py") and not PythonSource.read(content)}
    intact = tuple(version for version in versions if version.test.partition("::")[0] not in malformed)
    return Edition({path: content for path, content in edited.items() if path not in malformed}, intact)


def _with_definitions(
    content: bytes,
    edited: bytes,
    edits: Sequence[Edit],
    versions: Sequence[Version],
    path: str,
    definitions: Sequence[Change],
) -> bytes:
    """Change the definitions of variables in a file that no version of a test reads any more."""
    source = PythonSource.read(edited)
    if source is None:
        return edited
    tests = [version.test.partition("::") for version in versions]
    functions = [function for file, _, name in tests if file == path and (function := source.function(name))]
    extra_edits = [
        edit
        for variant, index in definitions
        if variant.path == path
        and not source.uses(variant.name, functions)
        and (edit := variant.definition_edit(index))
    ]
    return apply_edits(content, [*edits, *extra_edits]) if extra_edits else edited


def _new_name(name: str, used_names: set[str], rng: random.Random) -> str:
    """Return an unused name for a copy of a function, and mark it as used."""
    while name in used_names:
        name += f"_{rng.choice(_LETTERS)}"
    used_names.add(name)
    return name


def _numbered(tests: Iterable[str]) -> dict[str, str]:
    """Number the items of each function in collection order, because a changed table changes their ids."""
    counts = Counter[str]()
    item_numbers = {}
    for test in tests:
        base = node_id(test).partition("[")[0]
        item_numbers[test] = f"#{counts[base]}"
        counts[base] += 1
    return item_numbers


class Readout:
    """The results of a run, by function and parameters.

    Args:
        run: the run.
        files: the contents of the test files in that run.
    """

    def __init__(self, run: SuiteRun, files: Mapping[str, bytes]) -> None:
        self._sources = Sources(files)
        self._seconds = run.report.seconds
        self._functions: dict[str, dict[str, ItemResult]] = {}
        item_numbers = _numbered(run.report.parameters)
        for test, outcome in run.report.outcomes().items():
            result = ItemResult(outcome, test, run.report.places.get(test))
            base, bracket, parameters = node_id(test).partition("[")
            self._functions.setdefault(base, {})[item_numbers.get(test, bracket + parameters)] = result
            for name in first_words({test: outcome}):  # the benchmarks' lists may contain a shorter name
                self._functions.setdefault(name, {"": result})

    def items(self, name: str, test: str) -> dict[str, ItemResult]:
        """Return the results of a function's items.

        Args:
            name: the function's name in the runner's output.
            test: the function's pytest id, without parameters.
        """
        results = self._functions.get(name, {})
        return {item: replace(result, place=self._place(test, result.line)) for item, result in results.items()}

    def seconds(self, name: str) -> float:
        """Return the total duration of a function's tests; 0 if negligible."""
        return sum(self._seconds.get(result.test, 0.0) for result in self._functions.get(name, {}).values())

    def _place(self, test: str, line: int | None) -> str:
        """Return a line as ``FUNCTION+OFFSET``; FUNCTION is empty for the test's own function."""
        path, _, name = test.partition("::")
        source = self._sources.source(path)
        function = source.enclosing(line) if source and line else None
        if function is None or line is None:
            return ""
        label = "" if function.name == name.rpartition("::")[2] else function.name
        return f"{label}+{line - function.lineno}"
