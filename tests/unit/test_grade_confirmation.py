"""Confirmation: accidents in confirming runs are nobody's fault, evidence is, and neither earns a reward."""

from __future__ import annotations

import builtins
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisandbox.agents import open_agent
from minisandbox.cli.main import main
from minisandbox.errors import InvalidValue, RunError, SandboxGone
from minisandbox.grade import GradingOptions, confirmed_share
from minisandbox.grade.grading import grade_in, grade_trusted
from minisandbox.grade.judging import Doubt, SuiteRun
from minisandbox.grade.options import recorded_policy
from minisandbox.grade.report import Report, ReportLine
from minisandbox.grade.submission import CodePatch, reference_change
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


def honest(a: int, b: int) -> object:
    return b + a


ADDERS = {"reference": lambda a, b: a + b, "untouched": lambda a, b: a - b}


@dataclass(frozen=True)
class Place:
    """A workspace that runs test files in this process, and has the trouble that it is asked to have."""

    task: Task
    image: Any
    trouble: Trouble
    add: Callable[[int, int], object]
    files: tuple[str, ...] = (FILE,)
    timeout: float = 10.0
    hash_seed: int = 0
    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    timeouts: list[float] = field(default_factory=list)
    chosen: list[tuple[str, ...]] = field(default_factory=list)

    patient = Workspace.patient
    reseeded = Workspace.reseeded

    def run(self, change: CodePatch, edited: Mapping[str, bytes] | None = None, chosen: Sequence[str] = ()) -> SuiteRun:
        """As :meth:`.Workspace.run`."""
        who = "untouched" if change.is_empty else "reference" if change.only is None else "submission"
        what = "changed" if edited else "tests"
        before, self.runs[who, what] = self.runs[who, what], self.runs[who, what] + 1
        self.timeouts.append(self.timeout)
        self.chosen.append(tuple(chosen))
        if (found := self.trouble(who, what, before)) is not None:
            return found
        text = edited[FILE].decode() if edited else TESTS
        report = report_of(text, ADDERS.get(who, self.add), chosen)
        return SuiteRun(report, None, 0, 0.5)


def report_of(text: str, add: Callable[[int, int], object], chosen: Sequence[str] = ()) -> Report:
    space: dict[str, Any] = {"add": add, "__builtins__": builtins}
    exec(compile(text, FILE, "exec"), space)
    records, places = [], {}
    for name, test in list(space.items()):
        test_id = f"{FILE}::{name}"
        if name.startswith("test_") and (not chosen or test_id in chosen):
            try:
                test()
            except Exception as error:  # noqa: BLE001 - a test raises what it likes
                lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
                places[test_id] = lines[-1] or 0
            records.append(ReportLine(test_id, "call", "failed" if test_id in places else "passed"))
    return Report(tuple(records), started=True, places=places)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A task with a fix and two tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / FILE).write_text(TESTS)
    task = Task(
        "a__b-1", "a/b", "0" * 40, "words", PATCH.format(BROKEN, FIXED), "", (f"{FILE}::test_add",),
        (f"{FILE}::test_zero",),
    )  # fmt: skip
    image = SimpleNamespace(
        tests_dir=lambda: tmp_path, tests_layer=None, layers=(), workdir="/testbed", key="k", environment=()
    )
    return Place(task, image, lambda *_: None, honest)


@pytest.fixture(autouse=True)
def _without_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.grade.grading.protect_imports", lambda policy, *_: policy)


def graded(place: Place, confirm: str = "once", patch: str = OTHER) -> Grade:
    return grade_in(cast("Workspace", place), PATCH.format(BROKEN, patch).encode(), confirm)


def failing(reason: Reason, who: str, what: str, first: int = 0, times: int = 9) -> Trouble:
    """Trouble for some runs of somebody on something."""

    def trouble(by: str, on: str, before: int) -> SuiteRun | None:
        is_due = (by, on) == (who, what) and first <= before < first + times
        return SuiteRun.not_run(Doubt(reason, "words")) if is_due else None

    return trouble


ACCIDENTS = [Reason.TIMEOUT, Reason.OUT_OF_MEMORY, Reason.KILLED]
# two runs check once which tests can be changed, and where they fail on the untouched code
CONFIRMED = {
    ("submission", "tests"): 1, ("untouched", "tests"): 1, ("reference", "changed"): 1, ("submission", "changed"): 1
}  # fmt: skip
ONCE = {("submission", "tests"): 1}
SUSPICIOUS = "def add(a, b): return a + b if __import__('sys')._getframe(0) else None"


def test_an_honest_pass_takes_one_further_run_of_its_fail_to_pass_tests(place: Place) -> None:
    found = graded(place)
    assert (found.verdict, found.reward, found.flags) == (Verdict.RESOLVED, 1.0, ()), found
    assert place.runs == CONFIRMED
    chosen = place.chosen[-1]
    assert f"{FILE}::test_add" in chosen
    assert not [test for test in chosen if "test_zero" in test]


def test_always_takes_two_further_runs_of_all_tests(place: Place) -> None:
    assert graded(place, "always").resolved
    assert place.runs["submission", "changed"] == 2
    assert place.chosen[-2:] == [(), ()]


@pytest.mark.parametrize("policy", ["share(0)", "share(0.0)"])
def test_a_pass_without_a_flag_may_take_one_run(place: Place, policy: str) -> None:
    found = graded(place, policy)
    assert (found.verdict, found.reward, found.flags) == (Verdict.RESOLVED, 1.0, ()), found
    assert place.runs == ONCE


@pytest.mark.parametrize("policy", ["share(0)", "once", "always"])
def test_a_flagged_pass_is_always_confirmed(place: Place, policy: str) -> None:
    found = graded(place, policy, SUSPICIOUS)
    assert [flag.kind for flag in found.flags] == ["suspicious: frame_walking"], found
    assert place.runs["submission", "changed"] == 2
    forged = graded(replace(place, add=lambda *_: Equal()), policy, SUSPICIOUS)
    assert (forged.verdict, forged.reason) == (Verdict.TAMPERED, Reason.CHANGED_TEST_PASSED), forged


def test_a_share_of_the_others_is_drawn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.2, 0.4])
    dice = SimpleNamespace(random=lambda: next(draws))
    monkeypatch.setattr("minisandbox.grade.options.random", SimpleNamespace(SystemRandom=lambda: dice))
    assert graded(place, "share(0.3)").resolved
    assert place.runs == CONFIRMED
    place.runs.clear()
    assert graded(place, "share(.3)").resolved
    assert place.runs == ONCE


def test_a_pass_that_does_not_repeat_is_a_failure(place: Place) -> None:
    """A submission that recognises the further run and gives up its cheat there fails unchanged tests."""

    def wrong_later(who: str, what: str, before: int) -> SuiteRun | None:
        if who == "reference" or (what == "tests" and before == 0):
            return None
        tests = [test for test in place.chosen[-1] if test]
        return SuiteRun(Report(tuple(ReportLine(test, "call", "failed") for test in tests), started=True), None, 1, 0.5)

    found = graded(replace(place, trouble=wrong_later))
    assert (found.verdict, found.reason) == (Verdict.FAILED, Reason.NOT_REPEATED), found


def test_a_changed_test_that_fails_elsewhere_is_no_pass(place: Place) -> None:
    def elsewhere(who: str, what: str, _: int) -> SuiteRun | None:
        if who == "reference" or what == "tests":
            return None
        tests = [test for test in place.chosen[-1] if test]
        records = tuple(ReportLine(test, "call", "failed") for test in tests)
        return SuiteRun(Report(records, started=True, places=dict.fromkeys(tests, 1)), None, 1, 0.5)

    assert graded(replace(place, trouble=elsewhere)).reward != 1.0


def test_a_solution_that_keeps_a_state_is_run_without_copies(place: Place) -> None:
    """It may be asked once for each pair, as in a cache of a test's own: a copy in the same process asks again."""
    state: dict[int, set[tuple[int, int]]] = {}

    def once_for_each_pair(a: int, b: int) -> int:
        pairs = state.setdefault(len(place.timeouts), set())
        assert (a, b) not in pairs
        pairs.add((a, b))
        return a + b

    found = graded(replace(place, add=once_for_each_pair))
    assert (found.verdict, found.reward) == (Verdict.RESOLVED, 1.0), found


def test_a_run_from_before_there_were_policies_is_resumed_with_always(tmp_path: Path) -> None:
    """Those confirmed every pass: their rollouts are not mixed with others."""
    with RunDirectory.open(tmp_path, {}):
        pass
    with RunDirectory.open(tmp_path, recorded_policy("always")):
        pass
    with pytest.raises(RunError, match="confirm"):
        RunDirectory.open(tmp_path, recorded_policy("once"))


@pytest.mark.parametrize(
    "policy", ["", "never", "flagged", "Always", "share", "share()", "share(1.1)", "share(-1)", "share(nan)"]
)
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
def test_an_accident_in_the_further_run_is_made_good_by_another(place: Place, reason: Reason) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", "changed", times=1)))
    assert (found.verdict, found.reward) == (Verdict.RESOLVED, 1.0), found
    assert place.runs["submission", "changed"] == 2


@pytest.mark.parametrize("reason", [*ACCIDENTS, Reason.NO_END, Reason.INTERNAL_ERROR])
def test_a_further_run_that_is_never_believed_is_no_evidence(place: Place, reason: Reason) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", "changed")))
    assert (found.verdict, found.reason) == (Verdict.UNCONFIRMED, Reason.UNCONFIRMED), found
    assert (found.resolved, found.reward) == (None, None)
    assert "every named test passed" in found.detail
    assert str(reason) in found.detail
    assert place.runs["submission", "changed"] == 2


def test_a_sandbox_that_dies_in_the_further_run_is_no_evidence(place: Place) -> None:
    def trouble(who: str, what: str, _: int) -> SuiteRun | None:
        if (who, what) == ("submission", "changed"):
            raise SandboxGone("it is gone")
        return None

    assert graded(replace(place, trouble=trouble)).verdict is Verdict.UNCONFIRMED


def test_a_further_run_that_was_late_has_more_time_when_it_is_made_again(place: Place) -> None:
    assert graded(replace(place, trouble=failing(Reason.TIMEOUT, "submission", "changed", times=1))).resolved
    assert place.timeouts == [10.0, 10.0, 30.0, 10.0, 30.0], "the second and third check the tests"


@pytest.mark.parametrize("reason", [Reason.REPORT_DAMAGED, Reason.EXIT_FORGED, Reason.TESTS_CHANGED])
def test_forgery_in_the_further_run_is_tampering(place: Place, reason: Reason) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", "changed")))
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, reason), found


@pytest.mark.parametrize("reason", [*ACCIDENTS, Reason.INTERNAL_ERROR])
def test_a_forged_pass_earns_nothing_where_the_reference_cannot_be_run(place: Place, reason: Reason) -> None:
    """A submission that slows the machine down so that the control fails too gets no reward for it."""
    forged = replace(place, add=lambda *_: Equal())
    found = graded(forged)
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, Reason.CHANGED_TEST_PASSED), found
    forged.runs.clear()
    found = graded(replace(forged, trouble=failing(reason, "reference", "changed", first=1)))
    assert (found.verdict, found.reward) == (Verdict.UNCONFIRMED, None), found


def test_tests_that_cannot_be_changed_are_flagged(place: Place) -> None:
    (place.image.tests_dir() / FILE).write_text("print 'two'\n")
    found = graded(place)
    assert found.verdict is Verdict.RESOLVED
    assert [flag.kind for flag in found.flags] == ["not_confirmed"]


def test_a_reference_that_fails_on_changed_tests_confirms_nothing(place: Place) -> None:
    found = graded(replace(place, trouble=failing(Reason.TIMEOUT, "reference", "changed")))
    assert (found.verdict, found.reward) == (Verdict.UNCONFIRMED, None), found


ROWS = {"tests/test_calc.py::test_add[5]": {"n": "5"}}


def test_a_table_that_was_changed_when_it_was_collected_is_tampering(place: Place) -> None:
    """The first run itself shows it, so the check applies with every policy."""
    table = "import pytest\n@pytest.mark.parametrize('n', [4])\ndef test_add(n): pass\n"
    (place.image.tests_dir() / FILE).write_text(table)

    def changed(who: str, _: str, __: int) -> SuiteRun | None:
        report = replace(report_of(TESTS, honest), parameters=ROWS if who == "submission" else {})
        return SuiteRun(report, None, 0, 0.5)

    found = graded(replace(place, trouble=changed), "share(0)")
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, Reason.COLLECTION_CHANGED), found

    def both(_: str, __: str, ___: int) -> SuiteRun | None:
        return SuiteRun(replace(report_of(TESTS, honest), parameters=ROWS), None, 0, 0.5)

    assert graded(replace(place, trouble=both), "share(0)").resolved, "the reference's run shows it too"


@pytest.mark.parametrize("reason", [*ACCIDENTS, Reason.RESTORE_FAILED, Reason.LOG_UNREADABLE])
def test_an_accident_in_the_graded_run_is_not_blamed_at_once(place: Place, reason: Reason) -> None:
    found = graded(replace(place, trouble=failing(reason, "submission", "tests", times=1)))
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

    assert graded(replace(place, trouble=trouble), "share(0)").resolved
    assert place.timeouts == [10.0, 30.0, 60.0]


# --- a reference that hangs once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ACCIDENTS)
def test_a_reference_that_hangs_once_is_run_again_with_other_hashes(place: Place, reason: Reason) -> None:
    seeds = []

    def once(who: str, _: str, before: int) -> SuiteRun | None:
        return SuiteRun.not_run(Doubt(reason, "words")) if who == "reference" and before == 0 else None

    @dataclass(frozen=True)
    class Seeded(Place):
        def run(
            self, change: CodePatch, edited: Mapping[str, bytes] | None = None, chosen: Sequence[str] = ()
        ) -> SuiteRun:
            seeds.append((self.hash_seed, self.timeout))
            return super().run(change, edited, chosen)

    hanging = Seeded(place.task, place.image, once, place.add)
    found = grade_trusted(reference_change(place.task), cast("Workspace", hanging), "share(0)")
    assert found.verdict is Verdict.RESOLVED
    assert [(flag.kind, str(reason) in flag.detail) for flag in found.flags] == [("repeated", True)]
    assert seeds == [(0, 10.0), (1, 10.0)]


def test_a_reference_that_hangs_twice_has_failed(place: Place) -> None:
    hanging = replace(place, trouble=failing(Reason.TIMEOUT, "reference", "tests"))
    found = grade_trusted(reference_change(place.task), cast("Workspace", hanging), "share(0)")
    assert (found.verdict, place.runs["reference", "tests"]) == (Verdict.TIMEOUT, 2)


def test_a_control_that_hangs_once_does_not_make_a_failure_ours(place: Place) -> None:
    def trouble(who: str, what: str, before: int) -> SuiteRun | None:
        late = who == "submission" or before == 0
        return SuiteRun.not_run(Doubt(Reason.TIMEOUT, "words")) if late and what == "tests" else None

    found = graded(replace(place, trouble=trouble))
    assert (found.verdict, found.reward) == (Verdict.TIMEOUT, 0.0), found
    assert [flag.kind for flag in found.flags] == ["repeated"]


def test_reasons_of_older_records_are_read() -> None:
    assert {Reason(old) for old in ("sentinel_wrong", "runner_changed", "equality_forged")} == {
        Reason.CHANGED_TEST_PASSED
    }
