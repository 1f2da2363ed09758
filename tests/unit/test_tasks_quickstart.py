"""The bundled task set: what it promises, and that it was made from what lies in tools/quickstart."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from tests.builds import python_build

from minisandbox.patches import parse_patch
from minisandbox.tasks import Form, TaskSet, bundled_sets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def quickstart() -> TaskSet:
    return TaskSet.load("quickstart")


def test_it_is_bundled(quickstart: TaskSet) -> None:
    assert "quickstart" in bundled_sets()
    assert quickstart.name == "quickstart"


def test_it_is_as_large_and_as_mixed_as_promised(quickstart: TaskSet) -> None:
    forms = Counter(task.form for task in quickstart)
    assert len(quickstart) >= 10
    assert forms[Form.SWESMITH] >= 7
    assert forms[Form.SWEBENCH] >= 3
    assert len({task.repo for task in quickstart}) >= 6


def test_every_task_is_complete(quickstart: TaskSet) -> None:
    for task in quickstart:
        assert python_build(task).source is not None, task.instance_id
        assert 1 <= len(task.FAIL_TO_PASS) <= 30, task.instance_id
        assert len(task.PASS_TO_PASS) >= 20, task.instance_id
        assert len(task.problem_statement) >= 200, task.instance_id
        assert bool(task.test_patch) == (task.form is Form.SWEBENCH), task.instance_id


def test_all_share_one_requirements_layer(quickstart: TaskSet) -> None:
    assert len({(python_build(task).python, python_build(task).requirements) for task in quickstart}) == 1
    assert all("==" in line for task in quickstart for line in python_build(task).requirements)


def test_patches_change_code_and_test_patches_change_tests(quickstart: TaskSet) -> None:
    for task in quickstart:
        code = {change.path for change in parse_patch(task.patch)}
        tests = {change.path for change in parse_patch(task.test_patch)}
        assert not any("test" in path for path in code), task.instance_id
        assert all("test" in path for path in tests), task.instance_id
        assert tests <= set(task.test_files), task.instance_id


def test_statements_do_not_give_the_answer_away(quickstart: TaskSet) -> None:
    for task in quickstart:
        wanted = "-" if task.reference.reverse else "+"
        lines = (line[1:].strip() for line in task.patch.splitlines() if line[:1] == wanted and line[:3] != wanted * 3)
        assert not [line for line in lines if len(line) > 12 and line in task.problem_statement], task.instance_id


def test_it_was_made_from_its_inputs(quickstart: TaskSet, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "tools" / "make_quickstart_tasks.py").exists():
        pytest.skip("the sources of the task set are in the repository only")
    monkeypatch.syspath_prepend(str(ROOT))
    maker = import_module("tools.make_quickstart_tasks")
    drafts = maker.read_drafts(maker.INPUTS)
    assert tuple(draft.task.instance_id for draft in drafts) == quickstart.ids
    for draft in drafts:
        task = quickstart[draft.task.instance_id]
        assert maker.with_lists(draft.task, task.FAIL_TO_PASS, task.PASS_TO_PASS) == task
