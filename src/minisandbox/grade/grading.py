"""Grading: one submission, in a fresh sandbox, with the task's own tests (DESIGN 4.6)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError, PatchError, SandboxGone
from minisandbox.grade.belief import Doubt
from minisandbox.grade.policy import Policy
from minisandbox.grade.report import MISSING, not_passed
from minisandbox.grade.runner import SuiteRun, files_of
from minisandbox.grade.submission import Change, screen
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.grade.workspace import Workspace, workspace
from minisandbox.tasks import Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

# Nothing but the submission itself can cause these, so that no second run is needed to blame it.
_CERTAINLY_THE_SUBMISSION = frozenset({Reason.PATCH_INVALID, Reason.REPORT_DAMAGED})


def grade(
    task: Task, image: Image, submission: bytes, *, timeout: float | None = None, limits: Limits | None = None
) -> Grade:
    """Grade a submission: apply it to clean code in a fresh sandbox and run the task's tests.

    A run that cannot be believed is repeated with the reference in place of the submission: if that one is believed,
    the submission is at fault, else we are. So nothing a submission does can turn its failure into ours.

    Args:
        task: the task.
        image: the task's image.
        submission: the agent's patch; empty for none.
        timeout: seconds the tests may take; the task's own if None.
        limits: what the grading sandbox may use.

    Returns:
        The grade. Failures of ours are grades too, with the verdict ``infra_error``.

    Raises:
        InvalidValue: the task's tests are not pytest's.
    """
    started = time.monotonic()
    verdict = _grade(task, submission, _workspace(task, image, timeout, limits))
    return replace(verdict, duration=time.monotonic() - started)


def grade_reference(task: Task, image: Image, *, timeout: float | None = None, limits: Limits | None = None) -> Grade:
    """Grade the task's reference, applied as it is and never screened. Arguments and result as for :func:`grade`.

    Raises:
        InvalidValue: the task's tests are not pytest's.
    """
    started = time.monotonic()
    place = _workspace(task, image, timeout, limits)
    try:
        verdict = judge(task, place.run(reference_change(task)))
    except (MiniSandboxError, OSError) as error:
        verdict = _infrastructure(task, error)
    return replace(verdict, duration=time.monotonic() - started)


def reference_change(task: Task) -> Change:
    """Return the task's reference as a change."""
    reference = task.reference
    return Change(reference.patch.encode("utf-8", "surrogateescape"), reverse=reference.reverse)


def judge(task: Task, run: SuiteRun, flags: tuple[Flag, ...] = ()) -> Grade:
    """Return the verdict that a run supports.

    Resolved means: the run is believed, and every FAIL_TO_PASS and PASS_TO_PASS test is explicitly passed under its
    exact id. Missing, skipped and xfailed tests have not passed.

    Args:
        task: the task.
        run: what the tests showed.
        flags: what screening found.
    """
    seen = run.report.outcomes()
    named = task.FAIL_TO_PASS + task.PASS_TO_PASS
    outcomes = tuple((test, seen.get(test, MISSING)) for test in named)
    failed = not_passed(seen, task.FAIL_TO_PASS), not_passed(seen, task.PASS_TO_PASS)
    reason, detail = _reason(run.doubt, failed)
    return Grade(
        task.instance_id, reason.verdict, reason, detail, outcomes, *failed, flags, run.exit_code, run.duration, run.log
    )


def _reason(doubt: Doubt | None, failed: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[Reason, str]:
    if doubt is not None:
        return doubt.reason, doubt.detail
    if not any(failed):
        return Reason.RESOLVED, "every named test passed"
    detail = f"{len(failed[0])} FAIL_TO_PASS and {len(failed[1])} PASS_TO_PASS tests did not pass"
    return Reason.TESTS_NOT_PASSED, detail


def _workspace(task: Task, image: Image, timeout: float | None, limits: Limits | None) -> Workspace:
    files = files_of(task.FAIL_TO_PASS + task.PASS_TO_PASS)
    seconds = task.test_timeout if timeout is None else timeout
    return workspace(image, task.test_command, files, timeout=seconds, limits=limits)


def _grade(task: Task, submission: bytes, place: Workspace) -> Grade:
    try:
        change = screen(submission, Policy.for_task(task))
    except PatchError as error:
        return Grade(task.instance_id, Verdict.PATCH_INVALID, Reason.PATCH_INVALID, str(error))
    try:
        run = _run_surely(place, change)
        graded = judge(task, run, change.flags)
        if run.doubt is None or run.doubt.reason in _CERTAINLY_THE_SUBMISSION:
            return graded
        return _blame(task, place, graded)
    except (MiniSandboxError, OSError) as error:
        return _infrastructure(task, error, change.flags)


def _run_surely(place: Workspace, change: Change) -> SuiteRun:
    """Run once more where the sandbox ended: that may have been the host's fault, once, or the tests', twice."""
    for _ in range(2):
        try:
            return place.run(change)
        except SandboxGone as error:
            gone = error
    return SuiteRun.not_run(Doubt(Reason.SANDBOX_DIED, f"twice: {gone}"))


def _blame(task: Task, place: Workspace, graded: Grade) -> Grade:
    """Decide whose fault an unbelievable run was, by what the submission cannot influence: the reference's run."""
    control = place.run(reference_change(task))
    if control.doubt is None:
        return graded
    detail = f"{graded.reason}: {graded.detail}; and the reference's own run: {control.doubt.detail}"
    return replace(
        graded, verdict=Verdict.INFRA_ERROR, reason=Reason.REFERENCE_UNTRUSTED, detail=detail, log=control.log
    )


def _infrastructure(task: Task, error: Exception, flags: tuple[Flag, ...] = ()) -> Grade:
    detail = f"{type(error).__name__}: {error}"
    return Grade(task.instance_id, Verdict.INFRA_ERROR, Reason.INFRASTRUCTURE, detail, flags=flags)
