"""Graders as data: rows give them back equal, and wrong values are named by their field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.test_grade_validation import OURS

from minisandbox.errors import TaskFileError
from minisandbox.tasks import Grader, LogGrader, PytestGrader, ScriptGrader, task_from_row

GRADERS = (
    PytestGrader("python -m pytest -x", 12.0),
    LogGrader("go test -v ./...", "swebench:parse_log_gotest"),
    LogGrader("npm test", "swebench:apache/echarts", "fail_only", timeout=60.0),
    LogGrader("./runtests.py", "swebench:django/django", reporter="unittest"),
    ScriptGrader(),
    ScriptGrader(
        "bash /checks/run.sh",
        Path("/somewhere/checks"),
        "/checks",
        "/result/reward.json",
        "live",
        60.0,
        (("CHECKED", "yes"),),
        "root",
        "/checks",
    ),
)


@pytest.mark.parametrize("grader", GRADERS)
def test_a_row_gives_it_back(grader: Grader) -> None:
    task = replace(OURS, grader=grader)
    assert task_from_row(task.to_row()) == task


def test_files_are_found_from_the_task_file_and_stay_there(tmp_path: Path) -> None:
    row = replace(OURS, grader=ScriptGrader(files=Path("checks"))).to_row()
    grader = task_from_row(row, base=tmp_path).grader
    assert isinstance(grader, ScriptGrader)
    assert grader.files == tmp_path / "checks"


@pytest.mark.parametrize(
    ("test", "field"),
    [
        ({"command": " "}, "test.command"),
        ({"command": "pytest", "timeout": 0}, "test.timeout"),
        ({"command": "pytest", "timeout": float("nan")}, "test.timeout"),
        ({"command": "go test ./..."}, "test.command"),
        ({"command": "pytest", "grader": "junit"}, "test.grader"),
        ({"command": "pytest", "grader": 3}, "test.grader"),
        ({"command": "pytest", "parse": "x"}, "test.parse"),
        ({"command": "make", "parser": "swebench:x"}, "test.parser"),
        ({"command": "make", "grader": "log"}, "test.parser"),
        ({"command": "make", "grader": "log", "parser": "gotest"}, "test.parser"),
        ({"command": "make", "grader": "log", "parser": "swebench:x", "rule": "most"}, "test.rule"),
        ({"command": "make", "grader": "log", "parser": "swebench:x", "reporter": "jest"}, "test.reporter"),
        ({"command": "sh x", "grader": "script", "mode": "shared"}, "test.mode"),
        ({"command": "sh x", "grader": "script", "reward_file": "reward.txt"}, "test.reward_file"),
        ({"command": "sh x", "grader": "script", "reward_file": "/a/../b"}, "test.reward_file"),
        ({"command": "sh x", "grader": "script", "files_at": "/"}, "test.files_at"),
        ({"command": "sh x", "grader": "script", "environment": {"A": 1}}, "test.environment.A"),
    ],
)
def test_values_that_cannot_be_used(test: dict[str, object], field: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        task_from_row({**OURS.to_row(), "test": test})
    assert caught.value.field == field


def test_only_a_script_needs_neither_tests_nor_a_patch() -> None:
    bare = replace(OURS, grader=ScriptGrader(), patch="", test_patch="", FAIL_TO_PASS=(), PASS_TO_PASS=())
    assert task_from_row(bare.to_row()) == bare
    with pytest.raises(TaskFileError, match="'patch' is empty"):
        replace(bare, grader=PytestGrader())
