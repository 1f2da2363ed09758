"""run_batch_exit_statuses.yaml: ours, SWE-agent's, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisandbox.errors import TaskFileError
from minisandbox.tasks.formats.writing import written_whole
from minisandbox.tasks.statuses import STATUSES_NAME, read_statuses, write_statuses


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / STATUSES_NAME


def refused(file: Path, text: str) -> TaskFileError:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(TaskFileError) as caught:
        read_statuses(file)
    assert str(file) in str(caught.value)
    return caught.value


def test_statuses_come_back(file: Path) -> None:
    statuses = {"o__n-1": "passed", "o__n-2": "submitted (exit_cost)", "123": "null", "1e3": "passed", "é-4": "yes"}
    write_statuses(file, statuses)
    assert read_statuses(file) == statuses
    assert [path.name for path in file.parent.iterdir()] == [STATUSES_NAME]


def test_a_status_has_its_ids_under_it_as_others_write_it(file: Path) -> None:
    write_statuses(file, {"b": "passed", "a": "passed", "c": "failed"})
    lines = file.read_text().splitlines()
    assert [line.strip() for line in lines] == [
        "instances_by_exit_status:", "failed:", "- c", "passed:", "- b", "- a",
    ]  # fmt: skip


def test_no_statuses_come_back(file: Path) -> None:
    write_statuses(file, {})
    assert read_statuses(file) == {}


def test_a_directory_stands_for_the_file_in_it(file: Path) -> None:
    write_statuses(file, {"a": "passed"})
    assert read_statuses(file.parent) == {"a": "passed"}


def test_the_file_of_swe_agent_is_read(file: Path) -> None:
    file.write_text("instances_by_exit_status:\n    null:\n    - a\n    submitted: [b, b, '7', 8]\ntotal_cost: 1.5\n")
    assert read_statuses(file) == {"a": "null", "b": "submitted", "7": "submitted", "8": "submitted"}


def test_a_task_under_two_statuses_is_refused(file: Path) -> None:
    error = refused(file, "instances_by_exit_status: {passed: [a], failed: [a]}")
    assert "'a' is under 'passed' and under 'failed'" in error.what


@pytest.mark.parametrize(
    "text",
    ["", "a: b", "[1]", "instances_by_exit_status: [a]", "instances_by_exit_status: {passed: a}",
     "instances_by_exit_status: {passed: [{a: b}]}", "instances_by_exit_status:\n"],
)  # fmt: skip
def test_other_yaml_is_refused(file: Path, text: str) -> None:
    refused(file, text)


def test_what_is_not_yaml_is_refused_with_its_line(file: Path) -> None:
    assert refused(file, "instances_by_exit_status:\n  passed: [a\n  failed: {").line is not None


def test_no_object_of_a_tag_is_made(file: Path) -> None:
    file.write_text("instances_by_exit_status: {passed: [!!python/object/apply:os.getcwd []]}")
    with pytest.raises(TaskFileError):
        read_statuses(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_statuses(tmp_path / "none.yaml")


def write_half(file: Path) -> None:
    with written_whole(file) as part:
        part.write_text("half")
        raise InterruptedError


def test_a_write_that_fails_leaves_the_old_file(file: Path) -> None:
    write_statuses(file, {"a": "passed"})
    with pytest.raises(InterruptedError):
        write_half(file)
    assert read_statuses(file) == {"a": "passed"}
    assert [path.name for path in file.parent.iterdir()] == [STATUSES_NAME]
