"""What checks find in rows, and what they make of runs; the kernel's tests plant faults in images."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.unit.test_grade_validation import BENCH, EMPTY, F2P, GOOD, OURS, P2P, graded
from tests.unit.test_tasks_jsonl import row

from minisandbox.cli.main import main
from minisandbox.errors import BuildError, IndexUnavailable, MiniSandboxError
from minisandbox.grade import Grade, Reason, Status, validate
from minisandbox.grade.check import CHECKS, Severity, check_set
from minisandbox.grade.check.checks import RUNS, Evidence, findings
from minisandbox.grade.validation import Validation
from minisandbox.images import Image
from minisandbox.tasks import Task

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = sorted((ROOT / "examples/learning/data").glob("*.jsonl"))
IMAGE = "registry.example.org/a/b"


def test_every_check_is_documented_with_its_severity() -> None:
    text = (ROOT / "docs/how-to/check-a-task-set.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (error|warning) \|", text, flags=re.MULTILINE))
    assert listed == {name: check.severity.value for name, check in CHECKS.items()}
    assert all(check.find.__doc__ and check.advice for check in CHECKS.values())


def static(capsys: pytest.CaptureFixture[str], source: str, *words: str) -> tuple[int, list[tuple[str, str]]]:
    """Return the exit status, and each finding's task and check."""
    status = main(["tasks", "check", source, "--static", "--json", *words])
    return status, [(one["task"], one["check"]) for one in json.loads(capsys.readouterr().out)["findings"]]


@pytest.mark.parametrize("name", ["quickstart", *map(str, MUTATIONS)])
def test_bundled_rows_have_no_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert static(capsys, name) == (0, [])


def test_faults_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = {one: two for one in range(3)}\n"
    rows = {
        "good": row(),
        "twin": row(problem_statement="Other words."),
        "same-words": row(patch=fix),
        "smith": row(patch=fix, form="swesmith", problem_statement="a"),
        "smith-of-same-words": row(form="swesmith", problem_statement="a"),
        "told": row(repo="o/1", patch=fix, problem_statement="Write\n> a = {one: two for one in range(3)}\n"),
        "short": row(repo="o/2", problem_statement="Write c, not b."),
        "own": row(repo="o/3", FAIL_TO_PASS=["src/x.py::x.a"]),
        "image": row(repo="o/4", build={"image": IMAGE}),
        "pinned": row(repo="o/5", build={"image": f"{IMAGE}@sha256:{'0' * 64}"}),
        "loose": row(repo="o/6", build={"python": "3.11", "requirements": ["pytest>=8"]}),
        "branch": row(repo="o/7", build={"source": {"git": {"url": "https://example.org/a", "commit": "main"}}}),
        "bad": row(FAIL_TO_PASS=[]),
    }
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(one | {"instance_id": name}) + "\n" for name, one in rows.items()))
    wanted = {
        "twin": "duplicate", "same-words": "duplicate", "told": "solution_in_instruction", "own": "tests_in_patch",
        "image": "unpinned", "loose": "unpinned", "branch": "unpinned", f"{file}, line 13 (bad)": "unusable_row",
    }  # fmt: skip
    status, found = static(capsys, str(file))
    assert (status, sorted(found)) == (1, sorted(wanted.items()))
    assert static(capsys, str(file), "--only", "own") == (0, [("own", "tests_in_patch")]), "a warning is no failure"
    assert main(["tasks", "check", str(file), "--static", "-o", str(tmp_path / "out")]) == 1
    assert "pin it" in capsys.readouterr().out
    assert (tmp_path / "out/report.md").read_text().startswith("13 tasks checked, 0 of them")


def test_harbor_directories(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = static(capsys, f"harbor:{ROOT / 'tests/data/harbor'}")
    assert (status, found) == (0, [("count-lines", "unpinned"), ("publish-answer", "unpinned")])  # FROM harbor-base


# --- runs ------------------------------------------------------------------------------------------------------------


def seen(
    task: Task, reference: list[Grade], empty: list[Grade], flaky: tuple[str, ...] = (), *, valid: bool = True
) -> list[tuple[str, str]]:
    status = Status.VALID if valid else Status.INVALID
    known = Validation("a", status, flaky=flaky, reference=tuple(reference), empty=tuple(empty))
    found = findings(Evidence(task, timeout=100.0, validation=known), RUNS)
    return [(one.check, one.severity) for one in found]


LATE = replace(graded(("missing",) * 4, Reason.TIMEOUT), duration=100.0)
UNSURE = graded(("missing",) * 4, Reason.INFRASTRUCTURE)


BROKEN = ("passed", "passed", "failed", "passed")


@pytest.mark.parametrize(
    ("reference", "empty", "check", "softer"),
    [
        (GOOD, EMPTY, "", False),
        (GOOD, ("passed", "failed", "passed", "passed"), "f2p_not_failing", True),
        (GOOD, ("failed", "failed", "failed", "passed"), "p2p_not_passing", True),
        (("failed", "passed", "passed", "passed"), EMPTY, "reference_fails", False),
        (BROKEN, EMPTY, "reference_breaks_tests", False),
        (BROKEN, ("failed", "failed", "failed", "passed"), "p2p_not_passing", False),
        (("passed", "missing", "passed", "passed"), EMPTY, "missing_test", False),
        (GOOD, GOOD, "empty_resolves", False),
    ],
)
def test_each_test_is_reported_once(
    reference: tuple[str, ...], empty: tuple[str, ...], check: str, *, softer: bool
) -> None:
    """Softer: a warning for a row of a benchmark, whose own rule holds."""
    for task, severity in ((OURS, "error"), (BENCH, "warning" if softer else "error")):
        found = seen(task, [graded(reference)] * 2, [graded(empty)] * 2, valid=softer)
        assert found == ([(check, severity)] if check else []), task.grader


KINDS = (
    graded(GOOD), graded(EMPTY), graded(BROKEN), graded(("failed", "passed", "passed", "passed")),
    graded(("missing", "failed", "passed", "passed")), graded(("missing",) * 4, Reason.TIMEOUT),
    graded(("missing",) * 4, Reason.KILLED), graded(("missing", "failed", "missing", "passed"), Reason.INTERRUPTED, 2),
    graded(("missing",) * 4, Reason.INFRASTRUCTURE),
)  # fmt: skip


@pytest.mark.parametrize("task", [OURS, BENCH])
def test_a_task_has_an_error_if_and_only_if_it_is_not_valid(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    for first, second, third, fourth in itertools.product(KINDS, KINDS[1::2], repeat=2):
        ends = {"grade_reference": iter((first, second)), "grade_untouched": iter((third, fourth))}
        for name, runs in ends.items():
            monkeypatch.setattr(f"minisandbox.grade.validation.{name}", lambda *_, _runs=runs, **__: next(_runs))
        monkeypatch.setattr("minisandbox.grade.validation.find_leaks", lambda *_: ())
        known = validate(task, cast("Image", None), runs=2)
        found = findings(Evidence(task, timeout=100.0, validation=known), RUNS)
        assert any(one.severity is Severity.ERROR for one in found) is not known.valid, (known, found)


def test_flaky_and_late_runs_have_one_finding() -> None:
    good, empty = graded(GOOD), graded(EMPTY)
    other = graded(("failed", "passed", "passed", "passed"))
    assert seen(OURS, [good, other], [empty] * 2, (F2P[0],)) == [("flaky", "error")]
    assert seen(OURS, [other, good], [empty] * 2, (F2P[0],)) == [("flaky", "error")]
    assert seen(BENCH, [good] * 2, [empty] * 2, (P2P[0],)) == [("flaky", "warning")]
    assert seen(OURS, [LATE, good], [empty] * 2, (*F2P, *P2P)) == [("timeout", "error")]
    assert seen(OURS, [good] * 2, [LATE] * 2) == [("timeout", "error")]
    assert seen(OURS, [good, replace(good, duration=51.0)], [empty] * 2) == [("near_timeout", "warning")]
    assert seen(OURS, [UNSURE], [empty]) == [("infrastructure", "error")]


def test_an_image_that_cannot_be_built_is_a_finding_and_an_index_that_is_down_is_not_the_tasks() -> None:
    for error, wanted in ((BuildError("x"), "not_built"), (IndexUnavailable("x"), "infrastructure")):

        def image_of(_: Task, error: MiniSandboxError = error) -> Image:
            raise error

        [checked] = check_set([OURS], image_of)
        [one] = checked.findings
        assert (one.check, one.severity, checked.finished) == (wanted, Severity.ERROR, False)
