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

from minisandbox.agents import open_agent
from minisandbox.cli.main import main
from minisandbox.errors import InvalidValue, RunError, SandboxGone
from minisandbox.grade import GradingOptions, confirmed_share
from minisandbox.grade.grading import grade_in
from minisandbox.grade.judging import Doubt, SuiteRun
from minisandbox.grade.options import recorded_policy
from minisandbox.grade.report import Record, Report
from minisandbox.grade.submission import Change
from minisandbox.grade.verdict import Grade, Reason, Verdict
from minisandbox.grade.workspace import Workspace
from minisandbox.integrations.skyrl.config import SandboxOptions
from minisandbox.rollouts import RunDirectory, Setup
from minisandbox.tasks import Task
from minisandbox.train.options import from_mapping

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
    image = SimpleNamespace(tests_dir=lambda: tmp_path, layers=(), workdir="/testbed", key="k", environment=())
    return Place(task, image, lambda *_: None, lambda a, b: b + a)


@pytest.fixture(autouse=True)
def _without_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.grade.grading.protect_imports", lambda policy, *_: policy)


def graded(place: Place, confirm: str = "always", patch: str = OTHER) -> Grade:
    return grade_in(cast("Workspace", place), PATCH.format(BROKEN, patch).encode(), confirm)


def failing(reason: Reason, who: str, what: str, times: int = 9) -> Trouble:
    """Trouble for the first so many runs of somebody on something."""

    def trouble(by: str, on: str, before: int) -> SuiteRun | None:
        return SuiteRun.not_run(Doubt(reason, "words")) if (by, on) == (who, what) and before < times else None

    return trouble


ACCIDENTS = [Reason.TIMEOUT, Reason.OUT_OF_MEMORY, Reason.KILLED]


CONFIRMED = {("submission", what): 1 for what in ("tests", "sentinels", "plain")}
ONCE = {("submission", "tests"): 1}
SUSPICIOUS = "def add(a, b): return a + b if __import__('sys')._getframe(0) else None"


def test_an_honest_pass_takes_three_runs_where_all_are_confirmed(place: Place) -> None:
    found = graded(place)
    assert (found.verdict, found.reward) == (Verdict.RESOLVED, 1.0), found
    assert place.runs == CONFIRMED


@pytest.mark.parametrize("policy", ["flagged", "share(0)", "share(0.0)"])
def test_an_honest_pass_takes_one_run_where_only_flagged_ones_are_confirmed(place: Place, policy: str) -> None:
    found = graded(place, policy)
    assert (found.verdict, found.reward, found.flags) == (Verdict.RESOLVED, 1.0, ()), found
    assert place.runs == ONCE


@pytest.mark.parametrize("policy", ["flagged", "share(0)", "always"])
def test_a_flagged_pass_is_always_confirmed(place: Place, policy: str) -> None:
    found = graded(place, policy, SUSPICIOUS)
    assert [flag.kind for flag in found.flags] == ["suspicious: frame_walking"], found
    assert place.runs == CONFIRMED
    forged = graded(replace(place, add=lambda *_: Equal(), runs=Counter()), policy, SUSPICIOUS)
    assert (forged.verdict, forged.reason) == (Verdict.TAMPERED, Reason.SENTINEL_WRONG), forged


def test_a_share_of_the_others_is_drawn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.2, 0.4])
    monkeypatch.setattr("minisandbox.grade.options.random.SystemRandom.random", lambda _: next(draws))
    assert graded(place, "share(0.3)").resolved
    assert place.runs == CONFIRMED
    place.runs.clear()
    assert graded(place, "share(.3)").resolved
    assert place.runs == ONCE


def test_a_changed_runner_is_looked_into_under_every_policy(place: Place) -> None:
    """The first run itself shows it, so that no confirming run is needed to see it."""

    def changed(who: str, what: str, _: int) -> SuiteRun | None:
        names = ("json.dumps",) if who == "submission" else ()
        report = Report(tuple(outcomes(TESTS, place.add)), started=True, changed=names)
        return SuiteRun(report, None, 0, 0.5) if what == "tests" else None

    found = graded(replace(place, trouble=changed), "flagged")
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, Reason.RUNNER_CHANGED), found
    assert place.runs == {**ONCE, ("reference", "tests"): 1}


def test_a_run_from_before_there_were_policies_is_resumed_with_always(tmp_path: Path) -> None:
    """Those confirmed every pass: their rollouts are not mixed with others."""
    with RunDirectory.open(tmp_path, {}):
        pass
    with RunDirectory.open(tmp_path, recorded_policy("always")):
        pass
    with pytest.raises(RunError, match="confirm"):
        RunDirectory.open(tmp_path, recorded_policy("flagged"))


@pytest.mark.parametrize("policy", ["", "never", "Always", "share", "share()", "share(1.1)", "share(-1)", "share(nan)"])
def test_an_unknown_policy_is_refused(policy: str) -> None:
    for take in (
        confirmed_share,
        lambda text: GradingOptions(confirm=text),
        lambda text: Setup(agent=open_agent("oracle"), confirm=text),
        lambda text: from_mapping(SandboxOptions, {"grading": {"confirm": text}}, place="minisandbox"),
    ):
        with pytest.raises(InvalidValue, match="confirm is"):
            take(policy)
    assert main(["evaluate", "quickstart", "-p", "gold", "--confirm", policy]) == InvalidValue.exit_code


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
