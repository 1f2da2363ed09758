"""Evaluate predictions: grade them, several at once, in a resumable run directory, and write the reports."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError
from minisandbox.grade.grading import grade, grade_reference, grade_untouched
from minisandbox.grade.judging import infrastructure_grade
from minisandbox.grade.options import ONCE, recorded_policy
from minisandbox.grade.sets.fingerprint import fingerprint
from minisandbox.grade.sets.predictions import EMPTY, GOLD, Prediction
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.pool import Elsewhere, ImageOf, Job, Progress, open_results, run_jobs
from minisandbox.store.rundir import RunDirectory, write_whole
from minisandbox.tasks import Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

REPORT = "report.json"
DETAILS = "evaluation.json"

EMPTY_PATCH = "empty_patch"
"""The verdict on a prediction without a patch: nothing is run for it, as swebench has it."""
MALFORMED = "malformed"
"""The verdict on a prediction that cannot be used."""

# swebench.harness.run_evaluation writes no report of an instance whose patch does not apply, whose tests run out of
# time or whose container fails, and its summary has those as errors. It has no word for an unconfirmed pass.
_ERRORS = frozenset({Verdict.PATCH_INVALID, Verdict.TIMEOUT, Verdict.UNCONFIRMED, Verdict.INFRA_ERROR, MALFORMED})
_BEFORE_THE_TESTS = frozenset({Reason.PATCH_INVALID, Reason.PATCH_STEP_FAILED, Reason.RESTORE_FAILED})


class EvaluationDirectory(RunDirectory):
    """The directory of an evaluation."""

    kind = "minisandbox-evaluation"
    folders = ("logs",)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation keeps of a prediction.

    Attributes:
        instance_id: the task's id.
        repo: the task's repository.
        model: whose prediction it is.
        verdict: of its grade; ``empty_patch`` or ``malformed`` without a grade.
        reason: of its grade.
        detail: the same in a sentence.
        flags: what screening found.
        failed_fail_to_pass: the FAIL_TO_PASS tests that did not pass.
        failed_pass_to_pass: the PASS_TO_PASS tests that did not pass.
        seconds: what grading it took, without building.
        log: the end of what the tests printed.
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
        """Whether it resolves its task."""
        return self.verdict == Verdict.RESOLVED

    @property
    def finished(self) -> bool:
        """Whether there is a verdict about it; otherwise it is evaluated again when the run goes on."""
        return self.verdict not in (Verdict.UNCONFIRMED, Verdict.INFRA_ERROR)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of evaluating predictions.

    Attributes:
        tasks: the tasks, with or without a prediction.
        predictions: those for one of the tasks, in the order of the tasks.
        results: one for each, in the same order.
        unknown: predictions for tasks that are not there.
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
    out: Path | None = None,
    workers: int = 1,
    timeout: float | None = None,
    confirm: str = ONCE,
    limits: Limits | None = None,
    config: Mapping[str, str] | None = None,
    build: Callable[[Sequence[Task]], None] | None = None,
    progress: Callable[[Progress[Evaluated]], None] | None = None,
    elsewhere: Elsewhere[Task] | None = None,
) -> Evaluation:
    """Grade predictions, several at once, and keep each grade in a run directory as it ends.

    The same call again resumes: predictions that have a verdict are taken over if neither their
    patch nor their task nor its image has changed; unconfirmed ones and those at which we failed are graded again.

    Args:
        tasks: the tasks.
        predictions: at most one for each task.
        image_of: returns a task's image; called by several threads at once. None where it is done elsewhere.
        out: the run directory; None to keep nothing.
        workers: predictions at once.
        timeout: seconds that the tests may take; each task's own if None.
        confirm: which passes are confirmed, as for :func:`.grade`.
        limits: what each sandbox may use.
        config: what else describes the run; going on with it needs the same.
        build: called once with the tasks whose images are needed: building many together is faster.
        progress: called on this thread for every one that ends, those that were finished before included.
        elsewhere: does it, with images of its own: the nodes of a cluster (:class:`.ClusterChecks`).

    Raises:
        InvalidValue: ``workers`` is less than 1.
        RunError: the directory is in use or belongs to another run.
        DiskFull: the disk is full; what was finished is kept.
    """
    everything, given = tuple(tasks), {one.instance_id: one for one in predictions}
    mine = tuple(given[task.instance_id] for task in everything if task.instance_id in given)
    work = partial(_evaluated, timeout=timeout, limits=limits, confirm=confirm)
    jobs = [_job(task, given[task.instance_id], work) for task in everything if task.instance_id in given]
    resolved = {**(config or {}), "timeout": timeout, "workers": workers, **recorded_policy(confirm)}
    with open_results(EvaluationDirectory, out, resolved) as results:
        found = run_jobs(
            jobs,
            results,
            Evaluated,
            image_of=image_of,
            workers=workers,
            build=build,
            progress=progress,
            elsewhere=elsewhere,
        )
    ids = {task.instance_id for task in everything}
    unknown = tuple(one for name, one in given.items() if name not in ids)
    return Evaluation(everything, mine, tuple(found[one.instance_id] for one in mine), unknown)


def _job(task: Task, one: Prediction, work: Callable[..., Evaluated]) -> Job[Task]:
    said = (one.model, one.problem, one.stands_for, hashlib.sha256(one.patch).hexdigest())
    about, failed = partial(fingerprint, task, said), partial(_failed, task, one)
    if one.problem or one.is_empty:
        verdict = MALFORMED if one.problem else EMPTY_PATCH
        done = Evaluated(task.instance_id, task.repo, one.model, verdict, verdict, one.problem)
        return Job(task.instance_id, about, lambda _: done, failed)
    return Job(task.instance_id, about, partial(work, task, one), failed, task)


def _evaluated(
    task: Task, one: Prediction, image: Image | None, *, timeout: float | None, limits: Limits | None, confirm: str
) -> Evaluated:
    assert image is not None
    if one.stands_for == GOLD:
        graded = grade_reference(task, image, timeout=timeout, limits=limits, confirm=confirm)
    elif one.stands_for == EMPTY:
        graded = grade_untouched(task, image, timeout=timeout, limits=limits)
    else:
        graded = grade(task, image, one.patch, timeout=timeout, limits=limits, confirm=confirm)
    return _kept(task, one, graded)


def _failed(task: Task, one: Prediction, error: MiniSandboxError, ours: bool) -> Evaluated:  # noqa: ARG001 - neither is its fault
    return _kept(task, one, infrastructure_grade(task, error))


def _kept(task: Task, one: Prediction, graded: Grade) -> Evaluated:
    return Evaluated(
        task.instance_id,
        task.repo,
        one.model,
        graded.verdict,
        graded.reason,
        graded.detail,
        graded.flags,
        graded.failed_fail_to_pass,
        graded.failed_pass_to_pass,
        log=graded.log,
    )


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
    row = asdict(one)
    del row["log"]
    seconds = row.pop("seconds")
    return {**row, "measured": {"seconds": seconds}}
