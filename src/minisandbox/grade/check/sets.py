"""Check several tasks at once in a resumable run directory, and write the reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.grade.check.checks import (
    CHECKS,
    ROWS,
    RUNS,
    Evidence,
    Finding,
    Severity,
    findings,
    infrastructure,
    not_built,
    twins,
    unusable_row,
)
from minisandbox.grade.check.verifier import forgeable
from minisandbox.grade.judging import judge
from minisandbox.grade.sets.jobs import markdown_table, task_job, write_reports
from minisandbox.grade.submission import reference_change
from minisandbox.grade.validation import validate
from minisandbox.grade.verdict import Grade
from minisandbox.grade.workspace import Workspace
from minisandbox.runs import ImageOf, RunDirectory, RunOptions, run_jobs
from minisandbox.tasks import PytestGrader, Task
from minisandbox.tasks.loading import Refused

if TYPE_CHECKING:
    from minisandbox.images import Image

_VERSION = "1"
"""The version of the checks; results from other versions are not reused."""
_NOT_FINAL = frozenset({not_built.__name__, infrastructure.__name__})
_SEVERITIES, _NAMES = list(Severity), list(CHECKS)
_MEASURED = ("build_seconds", "test_seconds", "seconds")


class CheckDirectory(RunDirectory):
    """The run directory of a check."""

    kind = "minisandbox-check"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of the checks of one task.

    Attributes:
        instance_id: the task's id; for a row that is no task, its position.
        findings: the faults of the task.
        ran: whether the image and the tests were checked, not only the row.
        runs: the number of runs of the reference, and of the untouched code.
        reference: the number of reference runs that resolved the task.
        empty: the number of runs of the untouched code that resolved the task.
        build_seconds: the build time of all layers of the image.
        test_seconds: the duration of the longest test run.
        seconds: the duration of the check, without the build.
    """

    instance_id: str
    findings: tuple[Finding, ...]
    ran: bool = False
    runs: int = 0
    reference: int = 0
    empty: int = 0
    build_seconds: float = 0.0
    test_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the result is final; otherwise a resumed run checks the task again."""
        return not any(finding.check in _NOT_FINAL for finding in self.findings)


def check_set(
    tasks: Sequence[Task],
    image_of: ImageOf[Task] | None,
    *,
    refused: Sequence[Refused] = (),
    repeat: int = 2,
    timeout: float | None = None,
    **options: Unpack[RunOptions[Task, Checked]],
) -> tuple[Checked, ...]:
    """Check tasks, several at once, and record each result in the run directory.

    Calling it again resumes: a result is reused if the task's row, its image, ``repeat`` and ``timeout`` are unchanged.
    The checks of rows always run again.

    Args:
        tasks: the tasks.
        image_of: returns a task's image; called from several threads at once. None checks only rows.
        refused: the errors of rows that are no tasks; each becomes a finding.
        repeat: the number of runs of the reference, and of the untouched code.
        timeout: the time limit of one test run, in seconds; None for each task's own.
        options: ``out``, ``workers``, ``config``, ``build``, ``progress`` and ``elsewhere``, as :class:`.RunOptions`
            describes them.

    Returns:
        The results of the tasks, in order, followed by those of the refused rows.

    Raises:
        InvalidValue: ``repeat`` or ``workers`` is less than 1.
        RunError: the directory is in use or belongs to a run of another kind.
        DiskFull: the disk is full; finished results are kept.
    """
    if repeat < 1:
        raise InvalidValue(f"repeat is {repeat}", hint="give 1 or more")
    work = partial(_check, repeat=repeat, timeout=timeout)
    jobs = [task_job(task, work, _failed, _VERSION, f"{repeat} {timeout}") for task in tasks if image_of is not None]
    results, twin_sentences = run_jobs(CheckDirectory, Checked, jobs, image_of, {}, options), twins(tasks)
    checked = []
    for task in tasks:
        name = task.instance_id
        result = results.get(name, Checked(name, ()))
        about_row = findings(Evidence(task, twin_sentences.get(name, "")), ROWS)
        checked.append(replace(result, findings=about_row + result.findings))
    return (*checked, *map(_refused, refused))


def _refused(error: Refused) -> Checked:
    position = error.what.partition(": ")[0]
    check = CHECKS[unusable_row.__name__]
    return Checked(position, (Finding(position, check.name, check.severity, "", str(error)),))


def _check(task: Task, image: Image, *, repeat: int, timeout: float | None) -> Checked:
    evidence = gather(task, image, repeat, timeout)
    reference, empty = evidence.results.reference, evidence.results.empty
    return Checked(
        task.instance_id,
        findings(evidence, RUNS),
        True,
        repeat,
        sum(bool(run.resolved) for run in reference),
        sum(bool(run.resolved) for run in empty),
        evidence.build_seconds,
        max(run.duration for run in reference + empty),
    )


def _failed(task: Task, error: MiniSandboxError, is_infrastructure: bool) -> Checked:
    check = CHECKS[(infrastructure if is_infrastructure else not_built).__name__]
    return Checked(task.instance_id, findings(Evidence(task, failure=error), (check,)), True)


def gather(task: Task, image: Image, repeat: int, timeout: float | None) -> Evidence:
    """Run a task's tests, and collect the evidence for its checks.

    Args:
        task: the task.
        image: the task's image.
        repeat: the number of runs of the reference, and of the untouched code.
        timeout: the time limit of one test run, in seconds; None for the task's own.

    Raises:
        MiniSandboxError: the tests could not be run.
    """
    validation = validate(task, image, runs=repeat, timeout=timeout)
    evidence = Evidence(
        task,
        timeout=task.grader.timeout if timeout is None else timeout,
        build_seconds=sum(layer.seconds for layer in image.records()),
        validation=validation,
    )
    resolved = all(run.resolved for run in validation.reference)
    if not resolved or any(run.resolved is not False for run in validation.empty):
        return evidence
    reordered = _reordered(task, image, timeout) if repeat > 1 else None
    return replace(evidence, reordered=reordered, forged=forgeable(task, image, timeout))


def _reordered(task: Task, image: Image, timeout: float | None) -> Grade | None:
    """Run the reference with the test files in reverse order; return None if pytest does not run several files."""
    workspace = Workspace.of(task, image, timeout=timeout)
    if not isinstance(task.grader, PytestGrader) or len(workspace.files) < 2:
        return None
    return judge(task, replace(workspace, files=workspace.files[::-1]).run(reference_change(task)))


def write_check_reports(out: Path, checked: Sequence[Checked]) -> None:
    """Write ``report.json`` and ``report.md``.

    Args:
        out: the run directory.
        checked: the results.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_reports(out, check_report(checked), check_table(checked))


def all_findings(checked: Sequence[Checked]) -> list[Finding]:
    """Return the findings of all tasks: errors first, then by check, then in the order of the tasks."""
    return sorted(
        (finding for result in checked for finding in result.findings),
        key=lambda finding: (_SEVERITIES.index(finding.severity), _NAMES.index(finding.check)),
    )


def check_report(checked: Sequence[Checked]) -> dict[str, object]:
    """Return the machine-readable report. Measurements, which differ between runs, are under ``measured`` only.

    Args:
        checked: the results.
    """
    faults = all_findings(checked)
    results = []
    for result in checked:
        row = asdict(result) | {"findings": [finding.check for finding in result.findings]}
        results.append(row | {"measured": {name: row.pop(name) for name in _MEASURED}})
    return {
        "format": "minisandbox-check-report",
        "version": 1,
        "tasks": len(checked),
        "counts": {severity: sum(finding.severity is severity for finding in faults) for severity in Severity},
        "checks": Counter(finding.check for finding in faults),
        "findings": [asdict(finding) | {"advice": CHECKS[finding.check].advice} for finding in faults],
        "results": results,
    }


def summary(checked: Sequence[Checked]) -> str:
    """Return the counts of tasks and findings in one line."""
    counts = Counter(finding.severity for finding in all_findings(checked))
    phrases = (f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}" for severity in Severity)
    faults = " and ".join(phrases) if counts else "no findings"
    ran = sum(result.ran for result in checked)
    return f"{len(checked)} tasks checked, {ran} of them with their images and tests: {faults}"


def about(finding: Finding) -> str:
    """Return a finding in one line, with the first affected tests."""
    tests = f" ({', '.join(finding.tests[:2])}{', ...' if len(finding.tests) > 2 else ''})" if finding.tests else ""
    return (f"{finding.where}: " if finding.where else "") + finding.what + tests


def check_table(checked: Sequence[Checked]) -> str:
    """Return the report as Markdown.

    Args:
        checked: the results.
    """
    faults = all_findings(checked)
    lines = [summary(checked) + ".", ""]
    if faults:
        rows = [(finding.task, finding.severity, finding.check, about(finding)) for finding in faults]
        advice = {finding.check: CHECKS[finding.check].advice for finding in faults}
        lines += [*markdown_table(("task", "severity", "check", "finding"), rows), ""]
        lines += [*markdown_table(("check", "what to do"), list(advice.items())), ""]
    number_columns = ("reference", "empty", "tests", "build", "findings")
    return "\n".join((*lines, *markdown_table(("task", *number_columns), map(_cells, checked), number_columns), ""))


def _cells(result: Checked) -> tuple[str, ...]:
    passed = (f"{count} of {result.runs}" for count in (result.reference, result.empty))
    times = (f"{seconds:.1f} s" for seconds in (result.test_seconds, result.build_seconds))
    return (result.instance_id, *passed, *times, str(len(result.findings)))
