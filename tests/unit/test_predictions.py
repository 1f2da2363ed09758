"""Predictions: every layout the field's agents leave, and what is wrong with one is said or listed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from minisandbox.errors import PredictionError
from minisandbox.grade import Evaluated, Evaluation, Prediction, evaluation_report, harness_report, read_predictions
from minisandbox.grade.sets.evaluations import instance_report
from minisandbox.tasks import TaskSet

A = {"instance_id": "o__r-1", "model_name_or_path": "m/1", "model_patch": "diff --git a/x b/x\n"}
B = {"instance_id": "o__r-2", "model_name_or_path": "m/1", "model_patch": None}


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def layouts(root: Path) -> list[Path]:
    lines = "".join(json.dumps(one) + "\n" for one in (A, B))
    write(root / "agent" / "o__r-1" / "o__r-1.pred", A)
    write(root / "agent" / "o__r-2" / "o__r-2.pred", B)
    write(root / "agent" / "preds.json", {"o__r-1": A, "o__r-2": B})
    write(root / "mini" / "preds.json", {"o__r-1": A, "o__r-2": B})
    write(root / "mini" / "o__r-1" / "o__r-1.traj.json", {})
    write(root / "flat" / "o__r-1.pred", A)
    write(root / "flat" / "o__r-2.pred", B)
    return [
        write(root / "preds.json", {"o__r-1": A, "o__r-2": B}),
        write(root / "list.json", [A, B]),
        write(root / "preds.jsonl", lines + "\n"),
        root / "agent",
        root / "mini",
        root / "flat",
    ]


def test_every_layout_says_the_same(tmp_path: Path) -> None:
    for path in layouts(tmp_path):
        first, second = read_predictions(path)
        assert (first.instance_id, first.model, first.patch) == ("o__r-1", "m/1", b"diff --git a/x b/x\n"), path
        assert not first.is_empty
        assert second.is_empty
        assert str(tmp_path) in first.place
    (alone,) = read_predictions(tmp_path / "flat" / "o__r-1.pred")
    assert alone.instance_id == "o__r-1"


def test_the_id_may_be_the_key_alone_and_the_model_be_left_out(tmp_path: Path) -> None:
    (one,) = read_predictions(write(tmp_path / "preds.json", {"o__r-1": {"model_patch": "x"}}))
    assert (one.instance_id, one.model) == ("o__r-1", "unknown")


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    (one,) = read_predictions(write(tmp_path / "preds.json", {"o__r-1": {**A, "model_patch": "caf\udce9"}}))
    assert one.patch == b"caf\xe9"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"instance_id": "o__r-1"}, "no model_patch"),
        ({**A, "model_patch": 5}, "model_patch of type int"),
        ({**A, "model_patch": "\ud800"}, "stand for no bytes"),
        ({**A, "model_name_or_path": "m\ud800"}, "model_name_or_path with an unpaired surrogate"),
        ({**A, "model_name_or_path": ["m"]}, "model_name_or_path of type list"),
        ("diff", "of type str"),
    ],
)
def test_what_cannot_be_used_is_listed(tmp_path: Path, entry: object, problem: str) -> None:
    first, second = read_predictions(write(tmp_path / "preds.json", {"o__r-1": entry, "o__r-2": B}))
    assert problem in first.problem
    assert not first.is_empty
    assert first.model.encode()
    assert not second.problem


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("preds.jsonl", json.dumps(A) + "\n" + json.dumps(A), r"line 2: 'o__r-1' has a prediction already.*line 1"),
        ("preds.json", '{"a": {"model_patch": "x"}, "a": {"model_patch": "y"}}', "'a' is there twice"),
        ("preds.json", json.dumps([{"model_patch": "x"}]), "entry 0: it has no instance_id"),
        ("preds.json", json.dumps({"b": A}), "its instance_id is 'o__r-1'"),
        ("preds.jsonl", json.dumps(A)[:-4], "line 1: not JSON"),
        ("preds.json", json.dumps(A) + "\n" + json.dumps(B), "not JSON at.*end in .jsonl"),
        ("preds.json", json.dumps([{**A, "instance_id": "\ud800"}]), "unpaired surrogate"),
        ("preds.json", "5", "neither an object nor a list"),
        ("preds.json", "{}", "has no predictions"),
        ("empty/x.txt", "", "has no predictions"),
    ],
)
def test_what_would_lose_something_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(PredictionError, match=complaint):
        read_predictions(path.parent if name.startswith("empty") else path)


def test_a_missing_file_and_two_attempts(tmp_path: Path) -> None:
    with pytest.raises(PredictionError, match="cannot be read"):
        read_predictions(tmp_path / "nothing.json")
    write(tmp_path / "a" / "o__r-1_0.pred", A)
    write(tmp_path / "a" / "o__r-1_1.pred", A)
    with pytest.raises(PredictionError, match="attempted more than once"):
        read_predictions(tmp_path / "a")


# --- the harness's report --------------------------------------------------------------------------------------------

KEYS = [
    "total_instances", "submitted_instances", "completed_instances", "resolved_instances", "unresolved_instances",
    "empty_patch_instances", "error_instances", "completed_ids", "incomplete_ids", "empty_patch_ids", "submitted_ids",
    "resolved_ids", "unresolved_ids", "error_ids", "schema_version",
]  # fmt: skip


def test_the_harness_report() -> None:
    """Each verdict is where swebench 4.1 has it, and every prediction is somewhere."""
    tasks = tuple(TaskSet.load("quickstart"))
    verdicts = (
        "resolved", "failed", "tampered", "oom", "patch_invalid", "timeout", "infra_error", "empty_patch", "malformed",
    )  # fmt: skip
    ids = {verdict: task.instance_id for verdict, task in zip(verdicts, tasks, strict=False)}
    results = tuple(
        Evaluated(task.instance_id, task.repo, "m", verdict, verdict)
        for verdict, task in zip(verdicts, tasks, strict=False)
    )
    predictions = tuple(Prediction(one.instance_id, "m") for one in results)
    found = Evaluation(tasks, predictions, results, (Prediction("other__other-1", "m"),))
    report = harness_report(found)
    assert sorted(report) == sorted(KEYS)
    assert report["schema_version"] == 2
    assert report["resolved_ids"] == [ids["resolved"]]
    assert report["unresolved_ids"] == sorted(ids[v] for v in ("failed", "tampered", "oom"))
    assert report["empty_patch_ids"] == [ids["empty_patch"]]
    broken = [ids[v] for v in ("patch_invalid", "timeout", "infra_error", "malformed")]
    assert report["error_ids"] == sorted([*broken, "other__other-1"])
    assert report["incomplete_ids"] == sorted(task.instance_id for task in tasks[len(verdicts) :])
    assert report["total_instances"] == len(tasks)
    assert report["submitted_instances"] == 10
    for name in ("submitted", "completed", "resolved", "unresolved", "empty_patch", "error"):
        assert report[f"{name}_instances"] == len(report[f"{name}_ids"])  # type: ignore[arg-type] # a list
    ours = evaluation_report(found)
    assert ours["resolved"] == 1
    assert sum(one["resolved"] for one in ours["repos"].values()) == 1  # type: ignore[attr-defined] # an object


def test_the_report_of_an_instance() -> None:
    task = next(iter(TaskSet.load("quickstart")))
    broken = task.PASS_TO_PASS[0]
    one = Evaluated(task.instance_id, task.repo, "m", "failed", "tests_not_passed", failed_pass_to_pass=(broken,))
    report = instance_report(task, one)[task.instance_id]
    assert isinstance(report, dict)
    assert list(report) == ["patch_is_None", "patch_exists", "patch_successfully_applied", "resolved", "tests_status"]
    assert report["patch_successfully_applied"] is True
    assert report["resolved"] is False
    status = report["tests_status"]
    assert list(status) == ["FAIL_TO_PASS", "PASS_TO_PASS", "FAIL_TO_FAIL", "PASS_TO_FAIL"]
    assert status["FAIL_TO_PASS"] == {"success": list(task.FAIL_TO_PASS), "failure": []}
    assert status["PASS_TO_PASS"]["failure"] == [broken]


def test_a_pipe_in_a_run_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "o__r-1.pred", A)
    os.mkfifo(tmp_path / "o__r-2.pred")
    assert [one.instance_id for one in read_predictions(tmp_path)] == ["o__r-1"]
