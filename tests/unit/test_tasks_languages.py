"""Rows of tasks in other languages: each is refused by name, and the rest of the set is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.builds import python_build
from tests.unit.test_tasks_dialects import SMITH, bench
from tests.unit.test_tasks_jsonl import row as own_row

from minisandbox.errors import TaskFileError
from minisandbox.tasks import TaskSet, task_from_row
from minisandbox.tasks.languages import NOT_PYTHON, check_command
from minisandbox.tasks.loading import Refused

COMMIT = "0" * 40
GO = bench(
    repo="gin-gonic/gin", instance_id="gin-gonic__gin-4003", version="4003", FAIL_TO_PASS=["TestPathParam"],
    PASS_TO_PASS=[],
)  # fmt: skip


def refused(row: Mapping[str, object]) -> TaskFileError:
    with pytest.raises(TaskFileError) as caught:
        task_from_row(row)
    assert caught.value.reason == NOT_PYTHON
    assert "--skip-unusable" in str(caught.value.hint)
    return caught.value


@pytest.mark.once  # it asks the benchmarks' packages
def test_a_row_that_swebench_builds_for_another_language() -> None:
    assert refused({**GO, "environment_setup_commit": COMMIT}).field == "repo"


@pytest.mark.once
def test_a_row_that_swesmith_builds_for_another_language() -> None:
    row = {**SMITH, "instance_id": "gin-gonic__gin.3c12d2a8.func_pm_remove_cond__abc12345"}
    assert refused(row).field == "instance_id"


def test_a_row_without_the_columns_of_its_benchmark_is_not_taken_for_swe_gym() -> None:
    """It silently became a task for Python 3.10."""
    assert refused(GO).field == "FAIL_TO_PASS"
    assert refused({**GO, "FAIL_TO_PASS": ["src/a.test.ts > adds", "src/b.py.js"]}).field == "FAIL_TO_PASS"
    assert python_build(task_from_row(bench(), environment="pins")).python == "3.10"


@pytest.mark.parametrize("column", ["language", "repo_language"])
def test_a_row_that_names_its_language(column: str) -> None:
    assert refused({**bench(), column: "Go"}).field == column
    for other in ("python", "Python", "en", None):
        assert task_from_row({**bench(), column: other}) == task_from_row(bench())


@pytest.mark.parametrize(
    "command",
    ["go test ./...", "cd web && CI=1 npm test", "./gradlew test", "make; cargo test --all", "./mvnw -q test"],
)
def test_a_command_that_runs_no_python(command: str) -> None:
    assert refused(own_row(test={"command": command})).field == "test.command"


@pytest.mark.parametrize(
    "command", ["npm run build && pytest -rA", "python -m pytest", "make test", "tox -e py39 -- go", "./goto.sh"]
)
def test_a_command_that_may_run_python(command: str) -> None:
    check_command(command)


@pytest.mark.once
def test_the_rest_of_a_set_is_loaded(tmp_path: Path) -> None:
    """A KeyError of the first such row ended the loading of all."""
    rows = [{**GO, "environment_setup_commit": COMMIT}, bench(), {**GO, "instance_id": "gin-gonic__gin-1"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left_out: list[Refused] = []
    tasks = TaskSet.load(file, on_refused=left_out.append)
    assert tasks.ids == ("o__n-1",)
    assert [one.line for one in left_out if isinstance(one, TaskFileError)] == [1, 3]
    assert "gin-gonic__gin-4003" in str(left_out[0])
    with pytest.raises(TaskFileError, match="line 1"):
        TaskSet.load(file)
