"""Which rows are valid: a benchmark's by the benchmark's rules, our own by ours; the rest is notes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.unit.test_tasks_jsonl import row as own_row

from minisandbox.cli.validate import detail
from minisandbox.grade import Cause, Grade, Reason, Status, Validated, validate, validation_report, validation_table
from minisandbox.grade.confirm.changeable import ChangeableTests
from minisandbox.grade.validation import Validation
from minisandbox.images import Image
from minisandbox.runs import read_fields
from minisandbox.tasks import LogGrader, Task, task_from_row

F2P, P2P = ("t.py::new", "t.py::newer"), ("t.py::old", "t.py::older")
OURS = task_from_row(own_row(FAIL_TO_PASS=list(F2P), PASS_TO_PASS=list(P2P)))
BENCH = replace(OURS, grader=LogGrader("pytest", "swebench:pallets/flask", reporter="pytest"))
GOOD = ("passed",) * 4
EMPTY = ("failed", "failed", "passed", "passed")

Check = Callable[..., Validation]


def graded(outcomes: tuple[str, ...], reason: Reason | None = None, exit_code: int | None = None) -> Grade:
    named = (*F2P, *P2P)
    failed = tuple(test for test, word in zip(named, outcomes, strict=True) if word != "passed")
    reason = reason or (Reason.TESTS_NOT_PASSED if failed else Reason.RESOLVED)
    return Grade(
        "a", reason.verdict, reason, "words", tuple(zip(named, outcomes, strict=True)),
        tuple(test for test in failed if test in F2P), tuple(test for test in failed if test in P2P),
        exit_code=bool(failed) if exit_code is None else exit_code,
    )  # fmt: skip


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Validates a task whose runs end as told."""

    def validated(task: Task, reference: list[Grade], empty: list[Grade]) -> Validation:
        runs: dict[str, Iterator[Grade]] = {"grade_reference": iter(reference), "grade_untouched": iter(empty)}
        for name, ends in runs.items():
            monkeypatch.setattr(f"minisandbox.grade.validation.{name}", lambda *_, _ends=ends, **__: next(_ends))
        monkeypatch.setattr("minisandbox.grade.validation.find_leaks", lambda *_: ())
        monkeypatch.setattr("minisandbox.grade.validation.Workspace.of", lambda *_, **__: None)
        monkeypatch.setattr("minisandbox.grade.validation.changeable_tests", lambda _: ChangeableTests())
        return validate(task, cast("Image", None), runs=len(reference))

    return validated


@pytest.mark.parametrize("word", ["missing", "passed", "skipped", "incomplete"])
def test_one_test_that_is_seen_failing_is_enough_for_a_benchmark(check: Check, word: str) -> None:
    """Absent or garbled in the log without the patch, it made the row unusable."""
    runs = [graded(GOOD)], [graded((word, "failed", "passed", "passed"), exit_code=0)]
    found = check(BENCH, *runs)
    assert found.valid, found
    assert found.notes == (f"1 FAIL_TO_PASS tests were not seen failing without a patch: {F2P[0]}",)
    assert check(OURS, *runs).cause is Cause.F2P_NOT_FAILING


def test_a_preserved_test_that_fails_without_the_patch_is_a_note(check: Check) -> None:
    runs = [graded(GOOD)], [graded(("failed", "failed", "failed", "missing"))]
    found = check(BENCH, *runs)
    assert found.valid, found
    assert found.notes == (f"2 PASS_TO_PASS tests do not pass without a patch: {', '.join(P2P)}",)
    assert check(OURS, *runs).cause is Cause.P2P_NOT_PASSING


def test_tests_that_waver_are_notes_as_long_as_the_verdicts_hold(check: Check) -> None:
    runs = [graded(GOOD)] * 2, [graded(EMPTY), graded(("failed", "missing", "passed", "passed"))]
    found = check(BENCH, *runs)
    assert found.valid, found
    assert found.flaky == (F2P[1],)
    assert found.notes == (f"1 tests change from run to run: {F2P[1]}",)
    assert check(OURS, *runs).cause is Cause.FLAKY


@pytest.mark.parametrize(
    ("reference", "empty", "cause"),
    [
        ([graded(EMPTY)], [graded(EMPTY)], Cause.REFERENCE_FAILS),
        ([graded(GOOD)], [graded(GOOD)], Cause.EMPTY_RESOLVES),
        ([graded(GOOD)], [graded(("passed", "missing", "passed", "failed"), exit_code=0)], Cause.F2P_NOT_FAILING),
        ([graded(GOOD)], [graded(("missing",) * 4, Reason.TIMEOUT)], Cause.F2P_NOT_FAILING),
        ([graded(GOOD), graded(EMPTY)], [graded(EMPTY)] * 2, Cause.FLAKY),
        ([graded(GOOD)] * 2, [graded(EMPTY), graded(GOOD)], Cause.FLAKY),
        ([graded(GOOD)] * 2, [graded(EMPTY), graded(("passed",) * 3 + ("failed",))], Cause.F2P_NOT_FAILING),
    ],
)
def test_what_makes_a_row_of_a_benchmark_unusable(
    check: Check, reference: list[Grade], empty: list[Grade], cause: Cause
) -> None:
    found = check(BENCH, reference, empty)
    assert (found.status, found.cause) == (Status.INVALID, cause), found


def test_tests_of_a_module_that_cannot_be_imported_count_as_failing(check: Check) -> None:
    found = check(BENCH, [graded(GOOD)], [graded(("missing", "missing", "passed", "passed"), Reason.INTERRUPTED, 2)])
    assert found.valid
    assert found.notes == ()


def test_a_runner_that_nothing_listens_to_is_named(check: Check) -> None:
    """It ended as a reference that fails, or as a failure of ours, without a word about the runner."""
    other = replace(BENCH, grader=LogGrader("make test", "swebench:django/django", reporter="unittest"))
    silent = graded(("missing",) * 4, Reason.NOT_STARTED, 1)
    found = check(other, [silent], [silent])
    assert (found.status, found.cause) == (Status.INVALID, Cause.RUNNER_NOT_SUPPORTED)
    assert "make test" in found.detail
    gone = graded(("missing",) * 4, Reason.NOT_STARTED, 127)
    assert check(other, [gone], [gone]).cause is Cause.REFERENCE_FAILS
    assert check(BENCH, [silent], [silent]).cause is Cause.REFERENCE_FAILS


def test_notes_are_kept_printed_and_in_the_reports(tmp_path: Path) -> None:
    one = Validated("a", Status.VALID, repo="o/n", notes=("1 tests change from run to run: t.py::new",))
    assert detail(one) == "note: 1 tests change from run to run: t.py::new"
    report = json.loads(json.dumps(validation_report([one], 1)))
    assert (report["noted"], report["results"][0]["notes"]) == (1, list(one.notes))
    assert "note: 1 tests change" in validation_table([one], 1)


def test_results_of_earlier_versions_are_read() -> None:
    """As version 0.2 stored them: layers and runs are lists of three, and nothing says "notes"."""
    body = {
        "instance_id": "a", "repo": "o/n", "status": "invalid", "cause": "flaky", "detail": "", "tests": ["t.py::b"],
        "flaky": ["t.py::b"], "python": "3.11.9", "image_key": "k", "layers": [["l", 7, 1.5]],
        "reference": [["resolved", "resolved", 2.0]], "empty": [], "seconds": 3, "log": "",
    }  # fmt: skip
    found = read_fields(Validated, body)
    assert (found.status, found.cause, found.tests) == (Status.INVALID, Cause.FLAKY, ("t.py::b",))
    assert (found.layers[0].key, found.layers[0].bytes, found.reference[0].seconds) == ("l", 7, 2.0)
    assert (found.notes, found.seconds, found.finished) == ((), 3.0, True)
