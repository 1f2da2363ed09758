"""Judging: the verdict that one run of a task's tests supports."""

from __future__ import annotations

from minisandbox.grade.belief import Doubt
from minisandbox.grade.report import not_passed
from minisandbox.grade.runner import SuiteRun
from minisandbox.grade.verdict import Flag, Grade, Reason
from minisandbox.tasks import ScriptGrader, Task


def judge(task: Task, run: SuiteRun, flags: tuple[Flag, ...] = ()) -> Grade:
    """Return the verdict that a run supports.

    Resolved means: the run is believed, and every FAIL_TO_PASS and PASS_TO_PASS test is explicitly passed under its
    exact id. Missing, skipped and xfailed tests have not passed. Of a script's reward, 1 and more resolves the task.

    Args:
        task: the task.
        run: what the tests showed.
        flags: what screening found.
    """
    named = task.FAIL_TO_PASS + task.PASS_TO_PASS
    if isinstance(task.grader, ScriptGrader):
        return _scored(task, run, flags)
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


def _scored(task: Task, run: SuiteRun, flags: tuple[Flag, ...]) -> Grade:
    """Return the verdict on a script's reward: 1 and more resolves the task."""
    reason, detail = Reason.RESOLVED, f"the script's reward is {run.reward}"
    if run.doubt is not None:
        reason, detail = run.doubt.reason, run.doubt.detail
    elif run.reward is None or run.reward < 1:
        reason = Reason.TESTS_NOT_PASSED
    return Grade(
        task.instance_id, reason.verdict, reason, detail, flags=flags, exit_code=run.exit_code, duration=run.duration,
        log=run.log, score=run.reward,
    )  # fmt: skip


def _reason(doubt: Doubt | None, failed: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[Reason, str]:
    if doubt is not None:
        return doubt.reason, doubt.detail
    if not any(failed):
        return Reason.RESOLVED, "every named test passed"
    detail = f"{len(failed[0])} FAIL_TO_PASS and {len(failed[1])} PASS_TO_PASS tests did not pass"
    return Reason.TESTS_NOT_PASSED, detail
