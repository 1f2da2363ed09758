"""Confirmation: accidents in confirming runs are nobody's fault, evidence is, and neither earns a reward."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisandbox.errors import SandboxGone
from minisandbox.grade.belief import Doubt
from minisandbox.grade.grading import grade_in
from minisandbox.grade.report import Record, Report
from minisandbox.grade.runner import SuiteRun
from minisandbox.grade.submission import Change
from minisandbox.grade.verdict import Grade, Reason, Verdict
from minisandbox.grade.workspace import Workspace
from minisandbox.tasks import Task

PATCH = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-{}\n+{}\n"
BROKEN, FIXED, OTHER = "def add(a, b): return a - b", "def add(a, b): return a + b", "def add(a, b): return b + a"
FILE = "tests/test_calc.py"
TESTS = "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
Trouble = Callable[[str, str, int], "SuiteRun | None"]
"""Says what becomes of a run, given who runs (submission, reference), what, and how often before; None: all is well."""


class Equal(int):
    """Equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Place:
    """A workspace that runs test files in this process, and has the trouble that it is asked to have."""

    task: Task
    image: Any
    trouble: Trouble
    add: Callable[[int, int], object]
    files: tuple[str, ...] = (FILE,)
    timeout: float = 10.0
    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    timeouts: list[float] = field(default_factory=list)

    patient = Workspace.patient

    def run(self, change: Change, edited: Mapping[str, bytes] | None = None) -> SuiteRun:
        """As :meth:`.Workspace.run`."""
        who = "reference" if change.only is None else "submission"
        text = TESTS if edited is None else edited[FILE].decode()
        what = kind_of(text) if edited is not None else "tests"
        before, self.runs[who, what] = self.runs[who, what], self.runs[who, what] + 1
        self.timeouts.append(self.timeout)
        if (found := self.trouble(who, what, before)) is not None:
            return found
        records = tuple(outcomes(text, (lambda a, b: a + b) if who == "reference" else self.add))
        return SuiteRun(Report(records, started=True), None, 0, 0.5)


def kind_of(text: str) -> str:
    if "plainly_" in text:
        return "plain"
    return "sentinels" if "def test_add(" in text else "renamed"


def outcomes(text: str, add: Callable[[int, int], object]) -> Iterator[Record]:
    space: dict[str, Any] = {"add": add, "__builtins__": builtins}
    exec(text, space)
    for name, test in list(space.items()):
        if name.startswith("test_"):
            try:
                test()
            except AssertionError:
                yield Record(f"{FILE}::{name}", "call", "failed")
            else:
                yield Record(f"{FILE}::{name}", "call", "passed")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A task with a fix and two tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / FILE).write_text(TESTS)
    task = Task(
        "a__b-1", "a/b", "0" * 40, "words", PATCH.format(BROKEN, FIXED), "", (f"{FILE}::test_add",),
        (f"{FILE}::test_zero",),
    )  # fmt: skip
    image = SimpleNamespace(tests_dir=lambda: tmp_path, layers=(), workdir="/testbed", key="k")
    return Place(task, image, lambda *_: None, lambda a, b: b + a)


@pytest.fixture(autouse=True)
def _without_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.grade.grading.protect_imports", lambda policy, *_: policy)


def graded(place: Place) -> Grade:
    return grade_in(cast("Workspace", place), PATCH.format(BROKEN, OTHER).encode())


def failing(reason: Reason, who: str, what: str, times: int = 9) -> Trouble:
    """Trouble for the first so many runs of somebody on something."""

    def trouble(by: str, on: str, before: int) -> SuiteRun | None:
        return SuiteRun.not_run(Doubt(reason, "words")) if (by, on) == (who, what) and before < times else None

    return trouble


ACCIDENTS = [Reason.TIMEOUT, Reason.OUT_OF_MEMORY, Reason.KILLED]


def test_an_honest_pass_takes_three_runs(place: Place) -> None:
    found = graded(place)
    assert (found.verdict, found.reward) == (Verdict.RESOLVED, 1.0), found
    assert place.runs == {("submission", what): 1 for what in ("tests", "sentinels", "plain")}


@pytest.mark.parametrize("reason", ACCIDENTS)
@pytest.mark.parametrize("what", ["sentinels", "plain"])
def test_an_accident_in_a_confirming_run_is_made_good_by_another(place: Place, reason: Reason, what: str) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", what, 1)))
    assert (found.verdict, found.reward) == (Verdict.RESOLVED, 1.0), found
    assert place.runs["submission", what] == 2


@pytest.mark.parametrize("reason", [*ACCIDENTS, Reason.NO_END, Reason.INTERNAL_ERROR])
@pytest.mark.parametrize("what", ["sentinels", "plain"])
def test_a_confirming_run_that_is_never_believed_is_no_evidence(place: Place, reason: Reason, what: str) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", what)))
    assert (found.verdict, found.reason) == (Verdict.UNCONFIRMED, Reason.UNCONFIRMED), found
    assert (found.resolved, found.reward) == (None, None)
    assert "every named test passed" in found.detail
    assert str(reason) in found.detail
    assert place.runs["submission", what] == 2


def test_a_sandbox_that_dies_in_a_confirming_run_is_no_evidence(place: Place) -> None:
    def trouble(who: str, what: str, _: int) -> SuiteRun | None:
        if (who, what) == ("submission", "plain"):
            raise SandboxGone("it is gone")
        return None

    assert graded(replace(place, trouble=trouble)).verdict is Verdict.UNCONFIRMED


def test_a_confirming_run_that_was_late_has_more_time_when_it_is_made_again(place: Place) -> None:
    assert graded(replace(place, trouble=failing(Reason.TIMEOUT, "submission", "sentinels", 1))).resolved
    assert place.timeouts == [10.0, 10.0, 30.0, 10.0]


@pytest.mark.parametrize("reason", [Reason.REPORT_DAMAGED, Reason.EXIT_FORGED, Reason.TESTS_CHANGED])
def test_forgery_in_a_confirming_run_is_tampering(place: Place, reason: Reason) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", "sentinels")))
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, reason), found


@pytest.mark.parametrize("reason", [*ACCIDENTS, Reason.INTERNAL_ERROR])
def test_a_forged_pass_earns_nothing_where_the_reference_cannot_be_run(place: Place, reason: Reason) -> None:
    """Whoever slows the machine down so that the control fails too gets no reward for it."""
    forged = replace(place, add=lambda *_: Equal())
    found = graded(forged)
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, Reason.SENTINEL_WRONG), found
    found = graded(replace(forged, trouble=failing(reason, "reference", "sentinels")))
    assert (found.verdict, found.reward) == (Verdict.UNCONFIRMED, None), found


def test_edits_that_break_the_reference_too_say_nothing(place: Place) -> None:
    def trouble(_: str, what: str, __: int) -> SuiteRun | None:
        return SuiteRun.not_run(Doubt(Reason.INTERNAL_ERROR, "words")) if what == "sentinels" else None

    found = graded(replace(place, trouble=trouble))
    assert found.verdict is Verdict.RESOLVED
    assert [flag.kind for flag in found.flags] == ["no_sentinels"]


def test_a_changed_runner_is_not_blamed_where_the_reference_cannot_be_run(place: Place) -> None:
    def changed(who: str, what: str, _: int) -> SuiteRun | None:
        if (who, what) == ("submission", "tests"):
            report = Report(tuple(outcomes(TESTS, place.add)), started=True, changed=("json.dumps",))
            return SuiteRun(report, None, 0, 0.5)
        return SuiteRun.not_run(Doubt(Reason.TIMEOUT, "words")) if (who, what) == ("reference", "tests") else None

    assert graded(replace(place, trouble=changed)).verdict is Verdict.UNCONFIRMED


@pytest.mark.parametrize("reason", [*ACCIDENTS, Reason.RESTORE_FAILED, Reason.LOG_UNREADABLE])
def test_an_accident_in_the_graded_run_is_not_blamed_at_once(place: Place, reason: Reason) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", "tests", 1)))
    assert (found.verdict, found.reward) == (Verdict.RESOLVED, 1.0), found
    found = graded(replace(place, trouble=failing(reason, "submission", "tests")))
    assert (found.verdict, found.reward) == (reason.verdict, 0.0), found


def test_a_late_run_has_three_times_what_the_reference_needs_now(place: Place) -> None:
    def trouble(who: str, what: str, before: int) -> SuiteRun | None:
        if (who, what, before) == ("submission", "tests", 0):
            return SuiteRun.not_run(Doubt(Reason.TIMEOUT, "words"))
        if (who, what) == ("reference", "tests"):
            return SuiteRun(Report((), started=True), None, 0, 20.0)
        return None

    assert graded(replace(place, trouble=trouble)).resolved
    assert place.timeouts == [10.0, 30.0, 60.0, 60.0, 60.0]
