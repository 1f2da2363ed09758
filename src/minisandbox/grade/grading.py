"""Grading: one submission, in a fresh sandbox, with the task's own tests (DESIGN 4.6)."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError, PatchError, SandboxGone
from minisandbox.grade.belief import Doubt
from minisandbox.grade.comparisons import compare_plainly
from minisandbox.grade.imports import protect_imports
from minisandbox.grade.names import first_words, located
from minisandbox.grade.policy import Policy
from minisandbox.grade.report import not_passed
from minisandbox.grade.runner import SuiteRun, files_of
from minisandbox.grade.scan import scan
from minisandbox.grade.sentinels import make_sentinels
from minisandbox.grade.submission import Change, screen
from minisandbox.grade.testfiles import hidden_files
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.grade.workspace import Workspace, workspace
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.tasks import Task, file_of
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

# Nothing but the submission itself can cause these, so that no second run is needed to blame it.
_CERTAINLY_THE_SUBMISSION = frozenset({Reason.PATCH_INVALID, Reason.REPORT_DAMAGED})
_FAILING, _PASSING = frozenset({"failed", "error"}), frozenset({"passed", "xfailed", "xpassed"})
_SAMPLE = 20
UNCONFIRMED = "unconfirmed"
"""The kind of a flag: no test could be made to fail, so that the pass is believed on the report alone."""


def grade(
    task: Task,
    image: Image,
    submission: bytes,
    *,
    timeout: float | None = None,
    limits: Limits | None = None,
    cancellation: Cancellation | None = None,
) -> Grade:
    """Grade a submission: apply it to clean code in a fresh sandbox and run the task's tests.

    A run that cannot be believed is repeated with the reference in place of the submission: if that one is believed,
    the submission is at fault, else we are. So nothing a submission does can turn its failure into ours. A run in which
    everything passed is followed by one with :mod:`.sentinels`, tests that have to fail, and one with
    :mod:`.comparisons` of what values hold.

    Args:
        task: the task.
        image: the task's image.
        submission: the agent's patch; empty for none.
        timeout: seconds the tests may take; the task's own if None.
        limits: what the grading sandbox may use.
        cancellation: calls it off, from another thread.

    Returns:
        The grade. Failures of ours are grades too, with the verdict ``infra_error``.

    Raises:
        InvalidValue: the task's tests are not pytest's.
        CancelledError: it was called off; nothing of it is a grade.
    """
    started = time.monotonic()
    verdict = grade_in(workspace_for(task, image, timeout, limits, cancellation), submission)
    return replace(verdict, duration=time.monotonic() - started)


def grade_reference(task: Task, image: Image, *, timeout: float | None = None, limits: Limits | None = None) -> Grade:
    """Grade the task's reference, applied as it is and never screened. Arguments and result as for :func:`grade`.

    Raises:
        InvalidValue: the task's tests are not pytest's.
    """
    return _grade_own(task, reference_change(task), workspace_for(task, image, timeout, limits))


def grade_untouched(task: Task, image: Image, *, timeout: float | None = None, limits: Limits | None = None) -> Grade:
    """Grade the code that the agent is given, with nothing done to it. Arguments and result as for :func:`grade`.

    The way of a submission, but for two things: the tests run although there is nothing to judge, and there is no
    control: whoever asks this grades the reference too.

    Raises:
        InvalidValue: the task's tests are not pytest's.
    """
    return _grade_own(task, Change(), workspace_for(task, image, timeout, limits))


def _grade_own(task: Task, change: Change, place: Workspace) -> Grade:
    """Grade a change of ours."""
    started = time.monotonic()
    try:
        verdict = judge(task, place.run(change))
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
    named = task.FAIL_TO_PASS + task.PASS_TO_PASS
    if run.judgement is not None:
        seen = {test: word.lower() for test, word in run.judgement.statuses.items()}
        failed = run.judgement.failed_fail_to_pass, run.judgement.failed_pass_to_pass
    else:
        seen = run.report.outcomes()
        failed = not_passed(seen, task.FAIL_TO_PASS), not_passed(seen, task.PASS_TO_PASS)
    outcomes = tuple((test, seen.get(test) or run.report.absence(test)) for test in named)
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


def workspace_for(
    task: Task,
    image: Image,
    timeout: float | None = None,
    limits: Limits | None = None,
    cancellation: Cancellation | None = None,
) -> Workspace:
    """Return where a task is graded; arguments and errors as for :func:`grade`."""
    named = task.FAIL_TO_PASS + task.PASS_TO_PASS
    files = tuple(sorted({*map(file_of, located(task, named))})) if task.test_parser else files_of(named)
    seconds = task.test_timeout if timeout is None else timeout
    return workspace(image, task, files, timeout=seconds, limits=limits, cancellation=cancellation)


def grade_in(place: Workspace, submission: bytes) -> Grade:
    """Grade a submission in a workspace, which makes all runs that takes; without the time it took."""
    task = place.task
    policy = Policy.for_task(task)
    try:
        change = screen(submission, protect_imports(policy, task, place.image))
    except PatchError as error:
        return Grade(task.instance_id, Verdict.PATCH_INVALID, Reason.PATCH_INVALID, str(error))
    except (MiniSandboxError, OSError) as error:
        return _infrastructure(task, error)
    reference = reference_change(task)
    signs = scan(submission, change.only or (), reference.patch, reverse=reference.reverse, tests=task.test_files)
    flags = change.flags + signs
    if all(policy.is_beside_the_point(path) for path in change.only or ()):
        detail = "nothing of it is applied that a test could see: no file, or tests and documents only"
        return Grade(task.instance_id, Verdict.FAILED, Reason.NOTHING_TO_TEST, detail, flags=flags)
    try:
        run = _run_surely(place, change)
        graded = judge(task, run, flags)
        if run.doubt is not None:
            return graded if run.doubt.reason in _CERTAINLY_THE_SUBMISSION else _blame(task, place, graded)
        return _confirm(task, place, change, run, graded) if graded.resolved else graded
    except (MiniSandboxError, OSError) as error:
        return _infrastructure(task, error, flags)


def _confirm(task: Task, place: Workspace, change: Change, run: SuiteRun, graded: Grade) -> Grade:
    """Look for what a pass may have been made of: a changed runner, and tests that pass whatever they say."""
    if run.report.changed:
        control = place.run(reference_change(task))
        foreign = tuple(name for name in run.report.changed if name not in control.report.changed)
        if foreign:
            return _tampered(graded, Reason.RUNNER_CHANGED, f"while the tests ran, it changed {_some(foreign)}")
    files = hidden_files(place.image.tests_dir(), place.files)
    confirmed = _with_sentinels(task, place, change, files, graded)
    return _with_plain_values(task, place, change, files, confirmed) if confirmed.resolved else confirmed


def _with_sentinels(task: Task, place: Workspace, change: Change, files: Mapping[str, bytes], graded: Grade) -> Grade:
    """Look whether tests that expect something else fail."""
    chosen = task.FAIL_TO_PASS + _sample(task.PASS_TO_PASS)
    names = located(task, chosen)
    sentinels = make_sentinels(files, tuple(names), located(task, task.FAIL_TO_PASS))
    tests = tuple(_called(test, sentinels.copies, names) for test in sentinels.tests)
    same = tuple(_called(test, sentinels.same, names) for test in sentinels.same)
    if not tests:
        return _unconfirmed(graded, "the tests are in no file of the tests layer")
    run = _run_surely(place, change, sentinels.files)
    spared, lost = _not_seen(_FAILING, run, tests), _not_seen(_PASSING, run, same)
    if spared:
        control_spared = _not_seen(_FAILING, place.run(reference_change(task), sentinels.files), tests)
        foreign = tuple(test for test in spared if test not in control_spared)
        if foreign:
            return _tampered(graded, Reason.SENTINEL_WRONG, f"tests that had to fail did not: {_some(foreign)}")
        if len(control_spared) == len(tests):
            graded = _unconfirmed(graded, "no test could be changed so that it fails")
    return _with_renamed(task, place, change, sentinels.renamed, same, graded) if lost else graded


def _with_renamed(
    task: Task, place: Workspace, change: Change, renamed: Mapping[str, bytes], tests: tuple[str, ...], graded: Grade
) -> Grade:
    """Look whether tests pass under other names; copies beside them did not, which a state that they share can do."""
    lost = tests
    for who in (change, change, reference_change(task)):  # a test that wavers is nobody's doing
        seen = _not_seen(_PASSING, _run_surely(place, who, renamed), tests)
        lost = tuple(test for test in lost if (test in seen) is (who is change))
        if not lost:
            return graded
    return _tampered(graded, Reason.SENTINEL_WRONG, f"tests that passed did not under other names: {_some(lost)}")


def _called(test: str, copies: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return what the test's runner calls a sentinel."""
    original = copies.get(test, test)
    name = names.get(original, original)
    if name == original:
        return test
    before, after = (node_id.partition("[")[0].rpartition("::")[2] for node_id in (original, test))
    return re.sub(rf"(^|\.){before}(?=[ )]|$)", rf"\1{after}", name)  # test_it (module.TestIt.test_it)


def _with_plain_values(
    task: Task, place: Workspace, change: Change, files: Mapping[str, bytes], graded: Grade
) -> Grade:
    """Look whether tests pass that do not ask a submission's own values what they are equal to."""
    compared = compare_plainly(files)
    failed = _left_to_pass(task, _run_surely(place, change, compared)) if compared else ()
    if failed:  # a test that wavers is nobody's doing
        again = _left_to_pass(task, _run_surely(place, change, compared))
        failed = tuple(test for test in failed if test in again)
    if failed:
        control = _left_to_pass(task, place.run(reference_change(task), compared))
        failed = tuple(test for test in failed if test not in control)
    if failed:
        detail = f"these pass only where its own values say what they are equal to or near: {_some(failed)}"
        return _tampered(graded, Reason.EQUALITY_FORGED, detail)
    return graded


def _left_to_pass(task: Task, run: SuiteRun) -> tuple[str, ...]:
    """Return the named tests that did not pass; all of them, if the run is not believed."""
    if run.doubt is not None:
        return task.FAIL_TO_PASS + task.PASS_TO_PASS
    judged = judge(task, run)
    return judged.failed_fail_to_pass + judged.failed_pass_to_pass


def _sample(tests: tuple[str, ...]) -> tuple[str, ...]:
    """Return some tests, others each time: agents know those that must keep passing, and could forge them alone."""
    return tuple(random.SystemRandom().sample(tests, min(len(tests), _SAMPLE)))


def _not_seen(outcomes: frozenset[str], run: SuiteRun, tests: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tests that were not seen with one of these outcomes; all of them, if the run is not believed."""
    seen = first_words(run.report.outcomes()) if run.doubt is None else {}
    return tuple(test for test in tests if seen.get(test) not in outcomes)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tampered(graded: Grade, reason: Reason, detail: str) -> Grade:
    return replace(graded, verdict=reason.verdict, reason=reason, detail=detail)


def _unconfirmed(graded: Grade, detail: str) -> Grade:
    return replace(graded, flags=(*graded.flags, Flag(UNCONFIRMED, "", detail)))


def _run_surely(place: Workspace, change: Change, edited: Mapping[str, bytes] | None = None) -> SuiteRun:
    """Run once more where the sandbox ended: that may have been the host's fault, once, or the tests', twice."""
    for _ in range(2):
        try:
            return place.run(change, edited)
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
