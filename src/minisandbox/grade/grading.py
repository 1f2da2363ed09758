"""Grade a submission with the task's own tests, in a fresh sandbox."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError, PatchError, SandboxGone
from minisandbox.grade.confirm.confirmation import ACCIDENTS, Confirmation
from minisandbox.grade.graders.log import misreadings
from minisandbox.grade.harness_apply import apply_like_harness
from minisandbox.grade.imports import protect_imports
from minisandbox.grade.judging import Doubt, SuiteRun, infrastructure_grade, judge
from minisandbox.grade.options import ALWAYS, NEVER, ONCE, confirmed_share, is_confirmed
from minisandbox.grade.policy import Policy
from minisandbox.grade.scan import scan
from minisandbox.grade.submission import MAX_SUBMISSION, CodePatch, reference_change, screen
from minisandbox.grade.verdict import APPLIED_WITH_FUZZ, NOT_CONFIRMED, REPEATED, Flag, Grade, Reason, Verdict
from minisandbox.grade.workspace import Workspace
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.tasks import ScriptGrader, Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

# A loaded machine or a test that hangs by chance may cause these, so a run of trusted code is repeated.
_REPEATED = frozenset({Reason.TIMEOUT, Reason.KILLED, Reason.OUT_OF_MEMORY})
# Only the submission itself can cause these, so no control run is needed.
_CAUSED_BY_SUBMISSION = frozenset({Reason.PATCH_INVALID, Reason.REPORT_DAMAGED})


def grade(
    task: Task,
    image: Image,
    submission: bytes,
    *,
    timeout: float | None = None,
    limits: Limits | None = None,
    confirm: str = ONCE,
    cancellation: Cancellation | None = None,
) -> Grade:
    """Grade a submission: apply it to clean code in a fresh sandbox and run the task's tests.

    A run is believed if the runner's exit status fits the results that the reporter sent. If it is not believed, the
    tests run once more with the reference patch. If that run is believed, the submission is at fault, otherwise the
    infrastructure is. So a submission cannot turn its own failure into an infrastructure error.

    A pass is confirmed by a further run with changed tests (:mod:`.confirm.confirmation`). A script that writes no
    reward is an infrastructure error. If the task is normally graded in the agent's own sandbox, this function grades
    the patch instead.

    Args:
        task: the task.
        image: the task's image.
        submission: the agent's patch; may be empty.
        timeout: the time limit of the tests in seconds; None for the task's own.
        limits: the limits of the grading sandbox.
        confirm: how passes are confirmed: ``once``, ``always`` or ``share(P)`` (:class:`.GradingOptions`).
        cancellation: cancels the grading from another thread.

    Returns:
        The grade. Infrastructure errors become grades with the verdict ``infra_error``; a pass that was neither
        confirmed nor refuted has the verdict ``unconfirmed``.

    Raises:
        InvalidValue: a test of a pytest grader is not a pytest node id, or the policy is unknown.
        CancelledError: the grading was cancelled; there is no grade.
    """
    confirmed_share(confirm)  # reject an unknown policy before anything runs
    started = time.monotonic()
    workspace = Workspace.of(task, image, timeout=timeout, limits=limits, cancellation=cancellation)
    verdict = grade_in(workspace, submission, confirm)
    return replace(verdict, duration=time.monotonic() - started)


def grade_reference(
    task: Task,
    image: Image,
    *,
    timeout: float | None = None,
    limits: Limits | None = None,
    confirm: str = ONCE,
) -> Grade:
    """Grade the task's reference without screening it; see :func:`grade` for the arguments and the result.

    Raises:
        InvalidValue: a test of a pytest grader is not a pytest node id, or the policy is unknown.
    """
    return grade_trusted(reference_change(task), Workspace.of(task, image, timeout=timeout, limits=limits), confirm)


def grade_untouched(task: Task, image: Image, *, timeout: float | None = None, limits: Limits | None = None) -> Grade:
    """Grade the unchanged code that an agent gets; see :func:`grade` for the arguments and the result.

    Unlike for an empty submission, the tests run. There is no control run, because callers also grade the reference.

    Raises:
        InvalidValue: a test of a pytest grader is not a pytest node id.
    """
    return grade_trusted(CodePatch(), Workspace.of(task, image, timeout=timeout, limits=limits), NEVER)


def grade_trusted(change: CodePatch, workspace: Workspace, confirm: str) -> Grade:
    """Grade a trusted change in a workspace; see :func:`grade_reference` for the arguments and the result."""
    confirmed_share(confirm)
    started = time.monotonic()
    try:
        run, flags = _run_trusted(workspace, change)
        verdict = _confirmed(workspace, change, run, judge(workspace.task, run, flags), confirm)
        verdict = replace(verdict, misread=misreadings(workspace.task, run))
    except (MiniSandboxError, OSError) as error:
        verdict = infrastructure_grade(workspace.task, error)
    return replace(verdict, duration=time.monotonic() - started)


def _run_trusted(workspace: Workspace, change: CodePatch) -> tuple[SuiteRun, tuple[Flag, ...]]:
    """Run the tests on trusted code; if they time out, are killed or run out of memory, run them once more.

    A project's test can hang by chance, which is more likely on a loaded machine. The second run has another hash seed,
    because some tests hang only for some orders of hashes.

    Returns:
        The last run, and a flag about the first run if there were two.
    """
    run = workspace.run(change)
    if run.doubt is None or run.doubt.reason not in _REPEATED:
        return run, ()
    flag = Flag(REPEATED, "", f"the first run: {run.doubt.reason}: {run.doubt.detail}")
    return workspace.reseeded().run(change), (flag,)


def grade_in(workspace: Workspace, submission: bytes, confirm: str = ONCE) -> Grade:
    """Grade a submission in a workspace; the caller adds the duration.

    If ``git apply`` rejects the patch, try the commands of the official harness, which also apply damaged patches.
    """
    first_grade = _grade_patch(workspace, submission, confirm)
    if first_grade.reason is not Reason.PATCH_INVALID or len(submission) > MAX_SUBMISSION:
        return first_grade
    try:
        applied = apply_like_harness(workspace, submission)
    except (MiniSandboxError, OSError) as error:
        return infrastructure_grade(workspace.task, error)
    if applied is None:
        return first_grade
    second_grade = _grade_patch(workspace, applied.patch, confirm)
    if second_grade.reason is Reason.PATCH_INVALID:
        return first_grade
    return replace(second_grade, flags=(Flag(APPLIED_WITH_FUZZ, "", applied.command), *second_grade.flags))


def _grade_patch(workspace: Workspace, submission: bytes, confirm: str) -> Grade:
    """Grade a patch with ``git apply`` alone, without the fallback to the harness's commands."""
    task = workspace.task
    policy = Policy.for_task(task, dict(workspace.image.environment), workspace.image.workdir)
    try:
        change = screen(submission, protect_imports(policy, task, workspace.image))
    except PatchError as error:
        return Grade(task.instance_id, Verdict.PATCH_INVALID, Reason.PATCH_INVALID, str(error))
    except (MiniSandboxError, OSError) as error:
        return infrastructure_grade(task, error)
    reference = reference_change(task)
    signs = scan(submission, change.only or (), reference.patch, reverse=reference.reverse, tests=task.test_files)
    flags = change.flags + signs
    by_script = isinstance(task.grader, ScriptGrader)  # a script may judge files that no patch contains
    if not by_script and all(policy.is_beside_the_point(path) for path in change.only or ()):
        detail = "nothing of it is applied that a test could see: no file, or tests and documents only"
        return Grade(task.instance_id, Verdict.FAILED, Reason.NOTHING_TO_TEST, detail, flags=flags)
    try:
        if change.leave_out and (apply_problem := workspace.apply_problem(change)):
            return Grade(task.instance_id, Verdict.PATCH_INVALID, Reason.PATCH_INVALID, apply_problem, flags=flags)
        return _run_and_judge(workspace, change, flags, confirm)
    except (MiniSandboxError, OSError) as error:
        return infrastructure_grade(task, error, flags)


def _run_and_judge(workspace: Workspace, change: CodePatch, flags: tuple[Flag, ...], confirm: str) -> Grade:
    """Run the tests and grade them; if the run is not believed, run the reference to find out what is at fault.

    A run that may have failed by accident, e.g. a timeout on a loaded machine, is repeated before the submission is
    blamed. After a timeout, the new limit is three times the duration of the reference's run. A pass is confirmed if
    the policy requires it.
    """
    task, run = workspace.task, _run_with_retry(workspace, change)
    if run.doubt is not None and run.doubt.reason is Reason.NO_REWARD:
        return judge(task, run, flags)
    if run.doubt is not None and run.doubt.reason not in _CAUSED_BY_SUBMISSION:
        is_timeout = run.doubt.reason is Reason.TIMEOUT
        control, repeated = _run_trusted(workspace.patient() if is_timeout else workspace, reference_change(task))
        flags += repeated
        if control.doubt is not None:
            return _untrusted(judge(task, run, flags), control)
        if run.doubt.reason in ACCIDENTS - {Reason.SANDBOX_DIED}:  # a run in a dead sandbox was already repeated
            workspace = workspace.patient(control.duration) if is_timeout else workspace
            run = _run_with_retry(workspace, change)
    return _confirmed(workspace, change, run, judge(task, run, flags), confirm)


def _confirmed(workspace: Workspace, change: CodePatch, run: SuiteRun, graded: Grade, confirm: str) -> Grade:
    """Confirm a pass if the policy requires it; if no reporter observes the tests, only flag the pass."""
    if not graded.resolved:
        return graded
    if workspace.task.grader.reporter == "none":
        return replace(graded, flags=(*graded.flags, Flag(NOT_CONFIRMED, "", "no runner reports its tests")))
    suspicious = any(flag.is_suspicious for flag in graded.flags)
    is_thorough = confirm == ALWAYS
    confirmation = Confirmation(workspace, change, thorough=is_thorough, times=2 if is_thorough or suspicious else 1)
    graded = confirmation.check_collection(run, graded)
    if not graded.resolved or not is_confirmed(confirm, flagged=suspicious):
        return graded
    return confirmation.confirm(run, graded)


def _run_with_retry(workspace: Workspace, change: CodePatch) -> SuiteRun:
    """Run the tests; if the sandbox dies, run them once more, because the host may have caused the first death."""
    for _ in range(2):
        try:
            return workspace.run(change)
        except SandboxGone as error:
            last_error = error
    return SuiteRun.not_run(Doubt(Reason.SANDBOX_DIED, f"twice: {last_error}"))


def _untrusted(graded: Grade, control: SuiteRun) -> Grade:
    """Return an infrastructure error, because the reference's own run is not believed either."""
    assert control.doubt is not None
    detail = f"{graded.reason}: {graded.detail}; and the reference's own run: {control.doubt.detail}"
    return replace(
        graded, verdict=Verdict.INFRA_ERROR, reason=Reason.REFERENCE_UNTRUSTED, detail=detail, log=control.log
    )
