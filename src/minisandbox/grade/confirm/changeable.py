"""Find the expectations in a task's tests that confirming runs can change: the reference must fail the changed test.

The result is stored next to the layer with the hidden tests, and is removed together with the layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from minisandbox.errors import SandboxGone
from minisandbox.grade.confirm.editions import Change, Changes, Edition, Readout, Version, make_edition
from minisandbox.grade.confirm.edits import Sources
from minisandbox.grade.confirm.variants import WEAK, Variant, base_of, variants_of
from minisandbox.grade.judging import SuiteRun
from minisandbox.grade.names import first_words, located
from minisandbox.grade.report import FAILING, PASSED, Report
from minisandbox.grade.submission import CodePatch, reference_change
from minisandbox.grade.testfiles import hidden_files, snapshots_of
from minisandbox.grade.workspace import Workspace
from minisandbox.runs import read_fields
from minisandbox.store.disk.durable import write_atomic
from minisandbox.tasks import Task, node_id

_FORMAT = 12
_MOST_COPIES = 60
"""The maximum number of copies in one run, over all functions."""
_MOST_OF_ONE = 12
_MOST_ITEMS = 300
"""The maximum number of items of one function in the check, over its copies; each set of parameters is an item."""


@dataclass(frozen=True, slots=True)
class CheckedVariant:
    """A variant of a test that the reference fails, so that a pass of this variant exposes a forgery.

    Attributes:
        variant: the edit, with only those replacement texts that make the reference fail.
        failing: for each text, the items that fail, with the position of each failure.
    """

    variant: Variant
    failing: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Changeable:
    """A FAIL_TO_PASS test function, and how its expectations can be changed; each set of parameters is an item.

    Attributes:
        test: the pytest id without parameters.
        name: the name in the runner's output.
        named: the items that are in FAIL_TO_PASS.
        passing: the items that the reference passes if only FAIL_TO_PASS tests run.
        copies: whether an unchanged copy of the function passes.
        seconds: the duration; 0 if it is negligible.
        definition: the position of the function's definition; tests that inherit one method share it.
        broken: the positions at which the test fails on the untouched code.
        variants: the variants that the reference fails, the strongest first.
    """

    test: str
    name: str
    named: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    copies: bool = False
    seconds: float = 0.0
    definition: str = ""
    broken: tuple[str, ...] = ()
    variants: tuple[CheckedVariant, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangeableTests:
    """The changeable expectations of a task's FAIL_TO_PASS tests.

    Attributes:
        functions: the functions of FAIL_TO_PASS tests that are in a file of the hidden tests.
        doubt: why the reference's run on changed tests is not believed; "" if it is.
    """

    functions: tuple[Changeable, ...] = ()
    doubt: str = ""

    def by_kind(self, test_count: int) -> Counter[str]:
        """Count a task's FAIL_TO_PASS tests by the kind of their strongest variant; ``none`` if there is no variant.

        Args:
            test_count: the number of FAIL_TO_PASS tests, including those without a known file.
        """
        counts: Counter[str] = Counter()
        for function in self.functions:
            for item in function.named:
                matches = (entry for entry in function.variants if any(item in failing for failing in entry.failing))
                kinds = (match.variant.kind.value for match in matches)
                counts[next(kinds, "none")] += 1
        counts["none"] += max(0, test_count - counts.total())
        return +counts


def changeable_tests(workspace: Workspace) -> ChangeableTests:
    """Return the changeable expectations of a task's tests: the stored result, or that of a new check.

    Args:
        workspace: the workspace in which the task is graded.

    Raises:
        MiniSandboxError: a sandbox could not be created.
        CancelledError: the grading was cancelled.
    """
    path = _path(workspace)
    if path is not None and (cached := _read(path)) is not None:
        return cached
    if path is None or not (store := workspace.image.store).writable:
        return _check(workspace)
    with store.lock(f"changeable-{path.stem[-24:]}"):  # concurrent rollouts of a task check only once
        if (cached := _read(path)) is not None:
            return cached
        checked = _check(workspace)
        if not checked.doubt:
            with contextlib.suppress(OSError):  # without the file, the next call checks again
                write_atomic(path, json.dumps({"format": _FORMAT, **asdict(checked)}).encode())
        return checked


def _path(workspace: Workspace) -> Path | None:
    """Return the path of the stored result, or None if the image has no hidden tests."""
    layer = workspace.image.tests_layer
    if layer is None:
        return None
    task = workspace.task
    definition = [_FORMAT, workspace.image.key, task.FAIL_TO_PASS, task.grader.command, task.patch, task.test_patch]
    digest = hashlib.sha256(json.dumps(definition).encode()).hexdigest()
    return workspace.image.store.layer_directory(layer) / f"changeable-{digest[:24]}.json"


def _read(path: Path) -> ChangeableTests | None:
    try:
        cache = json.loads(path.read_bytes())
        functions = tuple(read_fields(Changeable, function) for function in cache["functions"])
        return ChangeableTests(functions) if cache["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check(workspace: Workspace) -> ChangeableTests:
    """Run the reference on changed copies of the tests, then on tests changed in place if no copy failed."""
    check = _Check(workspace)
    check.run_untouched()
    for maximum in (_MOST_OF_ONE, 2):  # many copies of a slow test may time out, so try again with fewer
        run = check.run(check.in_copies(maximum))
        if run.doubt is None:
            break
    else:
        return ChangeableTests(doubt=f"{run.doubt.reason}: {run.doubt.detail}" if run.doubt else "")
    if uncopied := check.in_place():
        check.run(uncopied)
    return check.result()


class _Check:
    """The check of one task's tests.

    Args:
        workspace: the workspace in which the task is graded.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files = test_files(workspace)
        self._sources = Sources(self._files)
        self._names = function_names(workspace.task)
        self._rng = random.SystemRandom()
        self._variants = variants_of(self._files, tuple(self._names), self._rng)
        self._passing: dict[str, tuple[str, ...]] = {}
        self._named: dict[str, tuple[str, ...]] = {}
        self._copies: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._failing: dict[tuple[str, Change], Mapping[str, str]] = {}
        self._inlined: set[str] = set()
        self._broken: dict[str, tuple[str, ...]] = {}

    def in_copies(self, maximum: int) -> dict[str, list[Changes]]:
        """Return the versions of each test: the original, two unchanged copies, and a copy per variant.

        The second unchanged copy contains the literal values of variables in place of their names.
        """
        copy_limit = _MOST_COPIES // max(1, len(self._variants))
        item_counts = Counter(map(base_of, self._workspace.task.FAIL_TO_PASS + self._workspace.task.PASS_TO_PASS))
        requested: dict[str, list[Changes]] = {}
        for test, variants in self._variants.items():
            count = max(2, min(maximum, copy_limit, _MOST_ITEMS // max(1, item_counts[test])))
            copyable = [variant for variant in variants if variant.is_local]
            orders = [(variant, variant.others.order) for variant in copyable]
            steps = range(max((len(order) for _, order in orders), default=0))
            rounds = [(variant, order[step]) for step in steps for variant, order in orders if step < len(order)]
            rounds.sort(key=lambda change: change[0] != copyable[0])
            condition = next((variant for variant in copyable if variant.kind in WEAK), None)
            # include an inverted condition, because it makes the test fail for every row of a parameter table
            changes = [*rounds[: count - 1], (condition, 0)] if condition else rounds[:count]
            requested[test] = [(), (), inlined(copyable), *((change,) for change in dict.fromkeys(changes))]
        return requested

    def in_place(self) -> dict[str, list[Changes]]:
        """Return the strongest variant of each test whose copies all passed or could not be made."""
        untried = {test: variants for test, variants in self._variants.items() if variants}
        for test, _ in self._failing:
            untried.pop(test, None)
        return {test: [((variants[0], 0),)] for test, variants in untried.items()}

    def run_untouched(self) -> None:
        """Record where the tests fail on the untouched code: a submission that fixes nothing must cheat there."""
        run = SuiteRun(Report())
        with contextlib.suppress(SandboxGone):
            run = self._workspace.run(CodePatch(), {}, tuple(self._names.values()))
        readout = Readout(run, self._files)
        for test, name in self._names.items():
            items = readout.items(name, test).values()
            positions = dict.fromkeys(item.place for item in items if self._is_named(item.test) and item.place)
            self._broken[test] = tuple(positions)
            self._variants.get(test, []).sort(key=lambda variant: self._distance(test, variant))

    def _distance(self, test: str, variant: Variant) -> tuple[bool, int]:
        """Return a variant's sort key: its distance from the failure on the untouched code; conditions come last."""
        lines = [
            int(line) for label, _, line in (position.rpartition("+") for position in self._broken[test]) if not label
        ]
        line = self._files[variant.path].count(b"\n", 0, variant.start) + 1 - self._line(test)
        return variant.kind in WEAK, min((abs(line - broken_line) for broken_line in lines if line >= 0), default=0)

    def run(self, requested: Mapping[str, Sequence[Changes]]) -> SuiteRun:
        """Run the reference on edited test files, and record the results."""
        edition = make_edition(self._files, requested, self._rng)
        test_names = names_of(edition, self._workspace.task, self._names)
        # all copies together may exceed the time limit of the tests
        run = self._workspace.patient().run(reference_change(self._workspace.task), edition.files, test_names)
        if run.doubt is None:
            self._note(edition, test_names, run)
        return run

    def _note(self, edition: Edition, test_names: Sequence[str], run: SuiteRun) -> None:
        readout = Readout(run, {**self._files, **edition.files})
        for version, name in zip(edition.versions, test_names, strict=True):
            results = readout.items(name, version.test)
            passing = tuple(item for item, result in results.items() if result.outcome == PASSED)
            if version.is_changed:
                failing = {item: result.place for item, result in results.items() if result.outcome in FAILING}
                if failing:
                    self._failing[version.original, version.changes[0]] = failing
            elif version.test == version.original:
                self._passing[version.test] = passing
                self._named[version.test] = tuple(
                    item for item, result in results.items() if self._is_named(result.test)
                )
                self._seconds[version.test] = readout.seconds(name)
            elif passing and passing == self._passing.get(version.original):
                (self._inlined if version.changes else self._copies).add(version.original)

    def _is_named(self, test: str) -> bool:
        return not {test, node_id(test), *first_words({test: ""})}.isdisjoint(self._workspace.task.FAIL_TO_PASS)

    def result(self) -> ChangeableTests:
        """Return the results of all runs."""
        return ChangeableTests(tuple(self._result(test, name) for test, name in self._names.items()))

    def _result(self, test: str, name: str) -> Changeable:
        # skip variants that replace names by values if the test's unchanged copy with such values did not pass
        usable = [
            variant
            for variant in self._variants.get(test, ())
            if not variant.own or test in self._inlined or test not in self._copies
        ]
        checked = [self._checked(test, variant) for variant in usable]
        return Changeable(
            test,
            name,
            self._named.get(test, ()),
            self._passing.get(test, ()),
            test in self._copies,
            self._seconds.get(test, 0.0),
            f"{test.partition('::')[0]}:{line}" if (line := self._line(test)) else "",
            self._broken.get(test, ()),
            tuple(variant for variant in checked if variant.failing),
        )

    def _line(self, test: str) -> int:
        """Return the line at which a test is defined, or 0 if its file cannot be parsed."""
        parsed = self._sources.find(test)
        return parsed[1].lineno if parsed else 0

    def _checked(self, test: str, variant: Variant) -> CheckedVariant:
        passing = set(self._passing.get(test, ()))
        indexes = [index for index in range(len(variant.texts)) if (test, (variant, index)) in self._failing]
        failing = [
            {item: position for item, position in self._failing[test, (variant, index)].items() if item in passing}
            for index in indexes
        ]
        indexed = [(index, failures) for index, failures in zip(indexes, failing, strict=True) if failures]
        checked = replace(variant, others=variant.others.kept([index for index, _ in indexed]))
        return CheckedVariant(checked, tuple(failures for _, failures in indexed))


def inlined(variants: Iterable[Variant]) -> Changes:
    """Return the changes that replace names by their unchanged values."""
    return tuple({(variant.start, variant.end): (variant, -1) for variant in variants if variant.own}.values())


def test_files(workspace: Workspace) -> dict[str, bytes]:
    """Return the contents of the hidden files of a task's tests, by path: sources and snapshots."""
    hidden = workspace.image.tests_dir()
    return hidden_files(hidden, (*workspace.files, *snapshots_of(hidden)))


def function_names(task: Task) -> dict[str, str]:
    """Map the pytest ids of FAIL_TO_PASS functions, without parameters, to the names that the runner prints."""
    ids = located(task, task.FAIL_TO_PASS)
    return {base_of(test): base_of(name) if task.grader.reporter == "pytest" else name for test, name in ids.items()}


def names_of(edition: Edition, task: Task, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the runner's names for the versions of tests in an edition.

    Args:
        edition: the edition.
        task: the task.
        names: the runner's names for the original tests, by pytest id.
    """
    if task.grader.reporter == "pytest":
        return tuple(version.test for version in edition.versions)
    return tuple(_renamed(version, names[version.original]) for version in edition.versions)


def _renamed(version: Version, name: str) -> str:
    """Return the name that unittest or SymPy prints for a version of a test, given the name of the original."""
    original, copy = (test.rpartition("::")[2] for test in (version.original, version.test))
    return re.sub(rf"(^|\.){re.escape(original)}(?=[ )]|$)", rf"\1{copy}", name)  # e.g. test_it (module.TestIt.test_it)
