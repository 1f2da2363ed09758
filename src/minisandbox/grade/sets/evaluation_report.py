"""The reports of an evaluation: swebench's own, and what it leaves out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from minisandbox.grade.sets.evaluations import EMPTY_PATCH, MALFORMED, Evaluated, Evaluation
from minisandbox.grade.sets.predictions import Prediction
from minisandbox.grade.verdict import Reason, Verdict
from minisandbox.store.rundir import write_whole
from minisandbox.tasks import Task

REPORT = "report.json"
DETAILS = "evaluation.json"

# swebench.harness.run_evaluation writes no report of an instance whose patch does not apply, whose tests run out of
# time or whose container fails, and its summary has those as errors. It has no word for an unconfirmed pass.
_ERRORS = frozenset({Verdict.PATCH_INVALID, Verdict.TIMEOUT, Verdict.UNCONFIRMED, Verdict.INFRA_ERROR, MALFORMED})
_BEFORE_THE_TESTS = frozenset({Reason.PATCH_INVALID, Reason.PATCH_STEP_FAILED, Reason.RESTORE_FAILED})


def write_evaluation_reports(out: Path, found: Evaluation) -> None:
    """Write what an evaluation found.

    ``report.json`` is what ``swebench.harness.run_evaluation`` writes for a run, ``logs/ID`` has what it writes for
    each instance (``report.json``, ``test_output.txt``, ``patch.diff``), ``evaluation.json`` is ours.

    Args:
        out: the run directory.
        found: the results of the predictions.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_whole(out / REPORT, _json(harness_report(found), indent=4))
    write_whole(out / DETAILS, _json(evaluation_report(found), indent=1))
    tasks = {task.instance_id: task for task in found.tasks}
    for one, prediction in zip(found.results, found.predictions, strict=True):
        place = out / "logs" / one.instance_id
        place.mkdir(exist_ok=True)
        files = {"patch.diff": prediction.patch, "test_output.txt": one.log.encode("utf-8", "surrogateescape")}
        if one.verdict not in _ERRORS and one.verdict != EMPTY_PATCH:
            files["report.json"] = _json(instance_report(tasks[one.instance_id], one), indent=4)
        for name in ("patch.diff", "test_output.txt", "report.json"):
            if files.get(name):
                write_whole(place / name, files[name])
            else:
                (place / name).unlink(missing_ok=True)


def _json(value: object, *, indent: int) -> bytes:
    return json.dumps(value, indent=indent).encode() + b"\n"


def harness_report(found: Evaluation) -> dict[str, object]:
    """Return the report that ``swebench.harness.run_evaluation`` writes (``make_run_report``, schema version 2).

    Its words: *completed* means that the tests ran and were judged; *error*, that the patch does not apply, that the
    tests ran out of time, that the pass is unconfirmed, that we failed, that the prediction cannot be used, or that
    there is no such task.
    """
    wrong = [one.instance_id for one in found.results if one.verdict in _ERRORS]
    without = [one.instance_id for one in found.results if one.verdict == EMPTY_PATCH]
    judged = [one for one in found.results if one.verdict not in _ERRORS and one.verdict != EMPTY_PATCH]
    strangers = [one.instance_id for one in found.unknown]
    submitted = [one.instance_id for one in found.results]
    ids = {
        "completed": [one.instance_id for one in judged],
        "incomplete": {task.instance_id for task in found.tasks}.difference(submitted),
        "empty_patch": without,
        "submitted": submitted + strangers,
        "resolved": [one.instance_id for one in judged if one.resolved],
        "unresolved": [one.instance_id for one in judged if not one.resolved],
        "error": wrong + strangers,
    }
    counted = ("submitted", "completed", "resolved", "unresolved", "empty_patch", "error")
    return {
        "total_instances": len(found.tasks),
        **{f"{name}_instances": len(ids[name]) for name in counted},
        **{f"{name}_ids": sorted(names) for name, names in ids.items()},
        "schema_version": 2,
    }


def instance_report(task: Task, one: Evaluated) -> dict[str, object]:
    """Return the report of one instance as swebench has it (``get_eval_report``).

    Args:
        task: the task.
        one: the result of its prediction.
    """
    nothing: dict[str, list[str]] = {"success": [], "failure": []}
    return {
        one.instance_id: {
            "patch_is_None": False,
            "patch_exists": True,
            "patch_successfully_applied": one.reason not in _BEFORE_THE_TESTS,
            "resolved": one.resolved,
            "tests_status": {
                "FAIL_TO_PASS": _parted(task.FAIL_TO_PASS, one.failed_fail_to_pass),
                "PASS_TO_PASS": _parted(task.PASS_TO_PASS, one.failed_pass_to_pass),
                "FAIL_TO_FAIL": nothing,
                "PASS_TO_FAIL": nothing,
            },
        }
    }


def _parted(tests: Sequence[str], failed: Iterable[str]) -> dict[str, list[str]]:
    wrong = frozenset(failed)
    return {"success": [t for t in tests if t not in wrong], "failure": [t for t in tests if t in wrong]}


def evaluation_report(found: Evaluation) -> dict[str, object]:
    """Return our report: verdicts, flags and accuracies. What is measured is under ``measured`` alone."""
    return {
        "format": "minisandbox-evaluation-report",
        "version": 1,
        "models": sorted({one.model for one in found.results}),
        **_score(found.tasks, found.results),
        "repos": repository_scores(found),
        "verdicts": dict(sorted(Counter(one.verdict for one in found.results).items())),
        "flagged": sum(bool(one.flags) for one in found.results),
        "unknown": {one.instance_id: one.place for one in found.unknown},
        "malformed": {one.instance_id: _where(one) for one in found.predictions if one.problem},
        "measured": {"seconds": sum(one.seconds for one in found.results)},
        "results": [_row(one) for one in found.results],
    }


def _where(one: Prediction) -> str:
    return f"{one.place}: {one.problem}"


def repository_scores(found: Evaluation) -> dict[str, Mapping[str, float]]:
    """Return by repository the numbers of tasks, predictions, resolved and unconfirmed ones, and the accuracy.

    The accuracy is the resolved ones out of all tasks: a task without a prediction is not solved.
    """
    repos = sorted({task.repo for task in found.tasks})
    return {
        repo: _score(
            [task for task in found.tasks if task.repo == repo], [one for one in found.results if one.repo == repo]
        )
        for repo in repos
    }


def _score(tasks: Sequence[Task], results: Sequence[Evaluated]) -> dict[str, float]:
    resolved = sum(one.resolved for one in results)
    return {
        "tasks": len(tasks),
        "predictions": len(results),
        "resolved": resolved,
        "unconfirmed": sum(one.verdict == Verdict.UNCONFIRMED for one in results),
        "accuracy": resolved / len(tasks) if tasks else 0.0,
    }


def _row(one: Evaluated) -> dict[str, object]:
    return {
        "instance_id": one.instance_id,
        "repo": one.repo,
        "model": one.model,
        "verdict": one.verdict,
        "reason": one.reason,
        "detail": one.detail,
        "flags": [{"kind": flag.kind, "path": flag.path, "detail": flag.detail} for flag in one.flags],
        "failed_fail_to_pass": list(one.failed_fail_to_pass),
        "failed_pass_to_pass": list(one.failed_pass_to_pass),
        "measured": {"seconds": one.seconds},
    }
