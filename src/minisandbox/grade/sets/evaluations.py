"""Grade several predictions at once in a resumable run directory, and write the reports."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from minisandbox.errors import MiniSandboxError
from minisandbox.grade.grading import grade, grade_reference, grade_untouched
from minisandbox.grade.judging import infrastructure_grade
from minisandbox.grade.options import ONCE, recorded_policy
from minisandbox.grade.sets.jobs import task_job, write_json, write_log
from minisandbox.grade.sets.predictions import EMPTY, GOLD, Prediction
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.runs import ImageOf, Job, RunDirectory, RunOptions, run_jobs
from minisandbox.tasks import Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

REPORT = "report.json"
DETAILS = "evaluation.json"

EMPTY_PATCH = "empty_patch"
"""The verdict on a prediction without a patch; as in swebench, no test runs."""
MALFORMED = "malformed"
"""The verdict on an unusable prediction."""

# swebench.harness.run_evaluation writes no report for an instance whose patch does not apply, whose tests time out or
# whose container fails. Its summary counts these as errors. It has no category for an unconfirmed pass.
_ERRORS = frozenset({Verdict.PATCH_INVALID, Verdict.TIMEOUT, Verdict.UNCONFIRMED, Verdict.INFRA_ERROR, MALFORMED})
_BEFORE_THE_TESTS = frozenset({Reason.PATCH_INVALID, Reason.PATCH_STEP_FAILED, Reason.RESTORE_FAILED})
_OF_GRADE = ("verdict", "reason", "detail", "flags", "failed_fail_to_pass", "failed_pass_to_pass", "log")


class EvaluationDirectory(RunDirectory):
    """The run directory of an evaluation."""

    kind = "minisandbox-evaluation"
    folders = ("logs",)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The recorded result of a prediction.

    Attributes:
        instance_id: the task's id.
        repo: the task's repository.
        model: the model that made the prediction.
        verdict: the verdict of the grade; without a grade, ``empty_patch`` or ``malformed``.
        reason: the reason of the verdict.
        detail: the reason in a sentence.
        flags: the findings of the screening.
        failed_fail_to_pass: the FAIL_TO_PASS tests that did not pass.
        failed_pass_to_pass: the PASS_TO_PASS tests that did not pass.
        seconds: the duration of the grading, without the build.
        log: the end of the tests' output.
    """

    instance_id: str
    repo: str
    model: str
    verdict: str
    reason: str = ""
    detail: str = ""
    flags: tuple[Flag, ...] = ()
    failed_fail_to_pass: tuple[str, ...] = ()
    failed_pass_to_pass: tuple[str, ...] = ()
    seconds: float = 0.0
    log: str = ""

    @property
    def resolved(self) -> bool:
        """Whether the prediction resolves its task."""
        return self.verdict == Verdict.RESOLVED

    @property
    def judged(self) -> bool:
        """Whether the tests ran to a verdict, in swebench's sense."""
        return self.verdict not in _ERRORS and self.verdict != EMPTY_PATCH

    @property
    def finished(self) -> bool:
        """Whether the verdict is final; otherwise a resumed run evaluates the prediction again."""
        return self.verdict not in (Verdict.UNCONFIRMED, Verdict.INFRA_ERROR)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of evaluating predictions.

    Attributes:
        tasks: the tasks, with or without a prediction.
        predictions: the predictions for these tasks, in the order of the tasks.
        results: the results, one per prediction and in the same order.
        unknown: predictions for unknown tasks.
    """

    tasks: tuple[Task, ...]
    predictions: tuple[Prediction, ...]
    results: tuple[Evaluated, ...]
    unknown: tuple[Prediction, ...] = ()


def run_evaluation(
    tasks: Iterable[Task],
    predictions: Iterable[Prediction],
    image_of: ImageOf[Task] | None,
    *,
    timeout: float | None = None,
    confirm: str = ONCE,
    limits: Limits | None = None,
    **options: Unpack[RunOptions[Task, Evaluated]],
) -> Evaluation:
    """Grade predictions, several at once, and record each grade in the run directory.

    Calling it again resumes: a recorded verdict is reused if the patch, the task and the image are unchanged.
    Predictions without a verdict (unconfirmed, infrastructure errors) are graded again.

    Args:
        tasks: the tasks.
        predictions: at most one per task.
        image_of: returns a task's image; called from several threads at once. None if other machines build the images.
        timeout: the time limit of the tests in seconds; None for each task's own.
        confirm: which passes are confirmed, as for :func:`.grade`.
        limits: the limits of each sandbox.
        options: ``out``, ``workers``, ``config``, ``build``, ``progress`` and ``elsewhere``, as :class:`.RunOptions`
            describes them.

    Raises:
        InvalidValue: ``workers`` is less than 1.
        RunError: the directory is in use or belongs to another run.
        DiskFull: the disk is full; finished grades are kept.
    """
    all_tasks, by_id = tuple(tasks), {prediction.instance_id: prediction for prediction in predictions}
    pairs = [(task, by_id.pop(task.instance_id)) for task in all_tasks if task.instance_id in by_id]
    work = partial(_evaluated, timeout=timeout, limits=limits, confirm=confirm)
    results = run_jobs(
        EvaluationDirectory,
        Evaluated,
        [_job(task, prediction, work) for task, prediction in pairs],
        image_of,
        {"timeout": timeout, "workers": options.get("workers", 1), **recorded_policy(confirm)},
        options,
    )
    matched = tuple(prediction for _, prediction in pairs)
    return Evaluation(all_tasks, matched, tuple(results.values()), tuple(by_id.values()))


def _job(task: Task, prediction: Prediction, work: Callable[..., Evaluated]) -> Job[Task]:
    patch = hashlib.sha256(prediction.patch).hexdigest()
    depends = (prediction.model, prediction.problem, prediction.stands_for, patch)
    job = task_job(task, partial(work, prediction), partial(_failed, prediction), *depends)
    if not (prediction.problem or prediction.is_empty):
        return job
    verdict = MALFORMED if prediction.problem else EMPTY_PATCH
    result = Evaluated(task.instance_id, task.repo, prediction.model, verdict, verdict, prediction.problem)
    return Job(job.id, job.fingerprint, lambda _: result, job.failed)


def _evaluated(
    prediction: Prediction,
    task: Task,
    image: Image,
    *,
    timeout: float | None,
    limits: Limits | None,
    confirm: str,
) -> Evaluated:
    if prediction.stands_for == GOLD:
        result = grade_reference(task, image, timeout=timeout, limits=limits, confirm=confirm)
    elif prediction.stands_for == EMPTY:
        result = grade_untouched(task, image, timeout=timeout, limits=limits)
    else:
        result = grade(task, image, prediction.patch, timeout=timeout, limits=limits, confirm=confirm)
    return _recorded(prediction, task, result)


def _failed(prediction: Prediction, task: Task, error: MiniSandboxError, _ours: bool) -> Evaluated:
    return _recorded(prediction, task, infrastructure_grade(task, error))


def _recorded(prediction: Prediction, task: Task, result: Grade) -> Evaluated:
    fields = {name: getattr(result, name) for name in _OF_GRADE}
    return Evaluated(task.instance_id, task.repo, prediction.model, **fields)


def write_evaluation_reports(out: Path, evaluation: Evaluation) -> None:
    """Write the results of an evaluation.

    ``report.json`` and the files of each instance in ``logs/ID`` (``report.json``, ``test_output.txt``, ``patch.diff``)
    have the format of ``swebench.harness.run_evaluation``. ``evaluation.json`` is our own report.

    Args:
        out: the run directory.
        evaluation: the results of the predictions.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_json(out / REPORT, harness_report(evaluation), indent=4)
    write_json(out / DETAILS, evaluation_report(evaluation))
    tasks = {task.instance_id: task for task in evaluation.tasks}
    for result, prediction in zip(evaluation.results, evaluation.predictions, strict=True):
        folder = out / "logs" / result.instance_id
        folder.mkdir(exist_ok=True)
        write_log(folder / "patch.diff", prediction.patch)
        write_log(folder / "test_output.txt", result.log)
        if result.judged:
            write_json(folder / REPORT, instance_report(tasks[result.instance_id], result), indent=4)
        else:
            (folder / REPORT).unlink(missing_ok=True)


def harness_report(evaluation: Evaluation) -> dict[str, object]:
    """Return the report in the format of ``swebench.harness.run_evaluation`` (``make_run_report``, schema version 2).

    In its terms, *completed* means that the tests ran and were judged. *Error* means that the patch does not apply, the
    tests timed out, the pass is unconfirmed, the infrastructure failed, the prediction is malformed, or there is no
    such task.
    """
    results, unknown = evaluation.results, [prediction.instance_id for prediction in evaluation.unknown]
    submitted = [result.instance_id for result in results]
    ids = {
        "completed": [result.instance_id for result in results if result.judged],
        "incomplete": {task.instance_id for task in evaluation.tasks}.difference(submitted),
        "empty_patch": [result.instance_id for result in results if result.verdict == EMPTY_PATCH],
        "submitted": submitted + unknown,
        "resolved": [result.instance_id for result in results if result.resolved],
        "unresolved": [result.instance_id for result in results if result.judged and not result.resolved],
        "error": [result.instance_id for result in results if result.verdict in _ERRORS] + unknown,
    }
    counted = ("submitted", "completed", "resolved", "unresolved", "empty_patch", "error")
    return {
        "total_instances": len(evaluation.tasks),
        **{f"{name}_instances": len(ids[name]) for name in counted},
        **{f"{name}_ids": sorted(names) for name, names in ids.items()},
        "schema_version": 2,
    }


def instance_report(task: Task, result: Evaluated) -> dict[str, object]:
    """Return the report of one instance as swebench writes it (``get_eval_report``).

    Args:
        task: the task.
        result: the result of its prediction.
    """
    no_tests: dict[str, list[str]] = {"success": [], "failure": []}
    return {
        result.instance_id: {
            "patch_is_None": False,
            "patch_exists": True,
            "patch_successfully_applied": result.reason not in _BEFORE_THE_TESTS,
            "resolved": result.resolved,
            "tests_status": {
                "FAIL_TO_PASS": _by_outcome(task.FAIL_TO_PASS, result.failed_fail_to_pass),
                "PASS_TO_PASS": _by_outcome(task.PASS_TO_PASS, result.failed_pass_to_pass),
                "FAIL_TO_FAIL": no_tests,
                "PASS_TO_FAIL": no_tests,
            },
        }
    }


def _by_outcome(tests: Sequence[str], failed: Sequence[str]) -> dict[str, list[str]]:
    failed_tests = frozenset(failed)
    return {
        "success": [test for test in tests if test not in failed_tests],
        "failure": [test for test in tests if test in failed_tests],
    }


def evaluation_report(evaluation: Evaluation) -> dict[str, object]:
    """Return our own report: verdicts, flags and accuracies. Durations, which vary, are under ``measured`` only."""
    results = evaluation.results
    malformed = {p.instance_id: f"{p.place}: {p.problem}" for p in evaluation.predictions if p.problem}
    return {
        "format": "minisandbox-evaluation-report",
        "version": 1,
        "models": sorted({result.model for result in results}),
        **_score(evaluation.tasks, results),
        "repos": repository_scores(evaluation),
        "verdicts": dict(sorted(Counter(result.verdict for result in results).items())),
        "flagged": sum(bool(result.flags) for result in results),
        "unknown": {prediction.instance_id: prediction.place for prediction in evaluation.unknown},
        "malformed": malformed,
        "measured": {"seconds": sum(result.seconds for result in results)},
        "results": [_row(result) for result in results],
    }


def repository_scores(evaluation: Evaluation) -> dict[str, Mapping[str, float]]:
    """Return, for each repository, the numbers of tasks and of predictions by kind, and the accuracy.

    The accuracy is the share of resolved tasks: a task without a prediction counts as not resolved.
    """
    return {
        repo: _score(
            [task for task in evaluation.tasks if task.repo == repo],
            [result for result in evaluation.results if result.repo == repo],
        )
        for repo in sorted({task.repo for task in evaluation.tasks})
    }


def _score(tasks: Sequence[Task], results: Sequence[Evaluated]) -> dict[str, float]:
    resolved = sum(result.resolved for result in results)
    return {
        "tasks": len(tasks),
        "predictions": len(results),
        "resolved": resolved,
        "unconfirmed": sum(result.verdict == Verdict.UNCONFIRMED for result in results),
        "accuracy": resolved / len(tasks) if tasks else 0.0,
    }


def _row(result: Evaluated) -> dict[str, object]:
    row = asdict(result)
    del row["log"]
    seconds = row.pop("seconds")
    return {**row, "measured": {"seconds": seconds}}
