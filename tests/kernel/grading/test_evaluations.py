"""Evaluating predictions: what each is worth, what is done again, and the files of the harness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.errors import NotFound
from minisandbox.grade import (
    Evaluated,
    Prediction,
    Progress,
    empty_predictions,
    reference_predictions,
    run_evaluation,
    write_evaluation_reports,
)
from minisandbox.images import Image
from minisandbox.store import Store
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]

FIX = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    return a - b
+    return b + a
     # that is all
"""
WRONG = FIX.replace("b + a", "a * b")
NO_PATCH = "no patch at all"


def named(smith: Task, *names: str) -> list[Task]:
    return [replace(smith, instance_id=f"calc__{name}", repo=f"example/{name[0]}") for name in names]


def predicted(**patches: str) -> list[Prediction]:
    return [Prediction(f"calc__{name}", "m/1", patch.encode()) for name, patch in patches.items()]


def test_each_prediction_gets_what_it_is_worth(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    tasks = named(smith, "a1", "a2", "b1", "b2", "b3")
    predictions = [*predicted(a1=FIX, a2=WRONG, b1=NO_PATCH, b2="", gone=FIX)]
    anew: list[str] = []

    def note(news: Progress[Evaluated]) -> None:
        anew.extend([] if news.resumed else [news.latest.instance_id])

    def again(predictions: list[Prediction]) -> dict[str, Evaluated]:
        anew.clear()
        found = run_evaluation(tasks, predictions, lambda _: smith_image, out=tmp_path / "r", workers=2, progress=note)
        write_evaluation_reports(tmp_path / "r", found)
        assert [one.instance_id for one in found.unknown] == ["calc__gone"]
        return {one.instance_id: one for one in found.results}

    found = again(predictions)
    assert [one.verdict for one in found.values()] == ["resolved", "failed", "patch_invalid", "empty_patch"]
    assert found["calc__a2"].failed_fail_to_pass == smith.FAIL_TO_PASS
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["resolved_ids"] == ["calc__a1"]
    assert report["unresolved_ids"] == ["calc__a2"]
    assert report["error_ids"] == ["calc__b1", "calc__gone"]
    assert report["incomplete_ids"] == ["calc__b3"]
    repos = json.loads((tmp_path / "r" / "evaluation.json").read_text())["repos"]
    assert repos["example/a"] == {"tasks": 2, "predictions": 2, "resolved": 1, "unconfirmed": 0, "accuracy": 0.5}
    assert repos["example/b"] == {"tasks": 3, "predictions": 2, "resolved": 0, "unconfirmed": 0, "accuracy": 0.0}

    logs = tmp_path / "r" / "logs"
    assert (logs / "calc__a1" / "patch.diff").read_text() == FIX
    one = json.loads((logs / "calc__a1" / "report.json").read_text())["calc__a1"]
    assert one["resolved"] is True
    assert one["tests_status"]["FAIL_TO_PASS"] == {"success": list(smith.FAIL_TO_PASS), "failure": []}
    assert "test_add" in (logs / "calc__a2" / "test_output.txt").read_text()
    assert not (logs / "calc__b1" / "report.json").exists()

    again(predictions)
    assert anew == []
    assert again([*predicted(a1=FIX, a2=FIX, b1=NO_PATCH, b2="", gone=FIX)])["calc__a2"].resolved
    assert anew == ["calc__a2"]


def test_references_and_empty_patches(smith: Task, smith_image: Image) -> None:
    tasks = named(smith, "a1")
    (gold,) = run_evaluation(tasks, reference_predictions(tasks), lambda _: smith_image).results
    (empty,) = run_evaluation(tasks, empty_predictions(tasks), lambda _: smith_image).results
    assert (gold.verdict, gold.model) == ("resolved", "gold")
    assert (empty.verdict, empty.model) == ("failed", "empty")


def test_our_failure_is_no_verdict(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    def missing(task: Task) -> Image:
        raise NotFound("no such image")

    tasks, predictions = named(smith, "a1"), predicted(a1=FIX)
    (one,) = run_evaluation(tasks, predictions, missing, out=tmp_path / "r").results
    assert (one.verdict, one.finished, one.detail) == ("infra_error", False, "NotFound: no such image")
    (one,) = run_evaluation(tasks, predictions, lambda _: smith_image, out=tmp_path / "r").results
    assert one.resolved


@pytest.mark.slow
def test_the_command(smith: Task, smith_image: Image, store: Store, tmp_path: Path) -> None:
    tasks = named(smith, "a1", "b1")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_row()) + "\n" for task in tasks))

    def evaluate(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "minisandbox", "evaluate", "tasks.jsonl", "--allow-local-sources", "-p", *words],
            capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False,
            env={**os.environ, "MINISANDBOX_STORE": str(store.root)},
        )  # fmt: skip

    good = {"model_name_or_path": "m", "model_patch": FIX}
    (tmp_path / "preds.json").write_text(json.dumps({"calc__a1": good, "calc__b1": {"model_patch": 5}, "x__y-1": good}))
    done = evaluate("preds.json", "-o", "run")
    assert done.returncode == 1, done.stderr
    assert "1 of 2 tasks resolved (50.0%); reports in run" in done.stdout
    assert "for tasks that are not in the set: 1" in done.stderr
    assert "calc__b1 has a model_patch of type int, not text" in done.stderr
    assert json.loads((tmp_path / "run" / "report.json").read_text())["resolved_ids"] == ["calc__a1"]

    chosen = evaluate("preds.json", "--only", "calc__a1", "--json")
    assert chosen.returncode == 1
    assert json.loads(chosen.stdout)["accuracy"] == 1.0
    (tmp_path / "strangers.json").write_text(json.dumps({"x__y-1": good}))
    assert evaluate("strangers.json").returncode == 6
    (tmp_path / "cut.json").write_text('{"calc__a1": ')
    cut = evaluate("cut.json")
    assert (cut.returncode, "not JSON" in cut.stderr) == (33, True)
    other = evaluate("gold", "-o", "run")
    assert (other.returncode, "predictions = 'preds.json', not 'gold'" in other.stderr) == (32, True)
