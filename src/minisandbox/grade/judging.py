"""Judge a test run of any runner: decide whether to believe the run, and derive the grade.

A run is believed if its exit status fits the test results that the reporter sent from the sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisandbox.grade.report import Report, not_passed
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.tasks import ScriptGrader, Task
from minisandbox.tasks.harness import Judgement
from minisandbox.types import ExecResult, Outcome

_LOG_TAIL = 16_000
# pytest's exit statuses (pytest.ExitCode, documented in "Exit codes"), unchanged since pytest 2.8.
_UNUSABLE = {
    2: (Reason.INTERRUPTED, "pytest was interrupted"),
    3: (Reason.INTERNAL_ERROR, "pytest had an internal error"),
    4: (Reason.USAGE_ERROR, "pytest refused its command line or could not load a conftest.py"),
    5: (Reason.NO_TESTS, "pytest collected no tests"),
}
# A shell's exit statuses (POSIX, "Exit Status for Commands"). A status of 1 or 2 may also be that of a wrapper script.
NOT_FOUND = {
    126: "the task's test command (test.command) cannot be executed",
    127: "a program of the task's test command (test.command) is not there",
}


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a run is not believed.

    Attributes:
        reason: the kind of doubt.
        detail: the doubt in a sentence.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """The results of one run of the tests.

    Attributes:
        report: the results that the reporter sent from the sandbox.
        doubt: why the run is not believed, or None if it is.
        exit_code: the runner's exit status, or None if it was killed or did not run.
        duration: the duration of the run in seconds.
        log: the end of the runner's output.
        judgement: the result of the benchmark's own parser and rules; None if the report decides.
        whole_log: the output that the parser reads.
        reward: the reward that a script wrote; None if tests decide.
    """

    report: Report
    doubt: Doubt | None = None
    exit_code: int | None = None
    duration: float = 0.0
    log: str = ""
    judgement: Judgement | None = None
    whole_log: str = ""
    reward: float | None = None

    @classmethod
    def not_run(cls, doubt: Doubt, log: str = "") -> SuiteRun:
        """Return a run whose tests did not start."""
        return cls(Report(), doubt, log=log)


def log_of(result: ExecResult) -> str:
    """Return the end of a command's output, followed by how the command ended."""
    streams = (result.stdout, result.stderr)
    output = "\n".join(stream.rstrip("\n") for stream in streams if stream.strip())
    return f"{output[-_LOG_TAIL:]}\n[{result.fate}]"


def doubt_about(result: ExecResult, report: Report) -> Doubt | None:
    """Return why a run is not believed, or None if it is.

    A run is believed if the runner exited, its report is complete, and both agree: status 0 without a failure, or
    status 1 with at least one failure.

    Args:
        result: the result of the runner's command.
        report: the plugin's report.
    """
    if result.outcome is Outcome.TIMEOUT:
        return Doubt(Reason.TIMEOUT, f"the tests {result.fate}")
    if report.damage is not None:
        return Doubt(Reason.REPORT_DAMAGED, report.damage)
    if "memory" in result.limits_hit and (report.end is None or report.end.exit_status != result.exit_code):
        return Doubt(Reason.OUT_OF_MEMORY, f"the sandbox ran out of memory; the test runner: {result.fate}")
    if result.exit_code is None or result.exit_code > 128:  # a shell reports a signal as 128 + its number
        return Doubt(Reason.KILLED, f"the test runner ended with {result.fate}")
    if not report.started:
        return _not_started(result.exit_code)
    return _doubt_about_end(result.exit_code, report)


def _not_started(exit_code: int) -> Doubt:
    if exit_code in NOT_FOUND:
        return Doubt(Reason.NOT_STARTED, f"{NOT_FOUND[exit_code]} (exit status {exit_code})")
    reason, detail = _UNUSABLE.get(exit_code, (Reason.NOT_STARTED, "pytest did not start"))
    return Doubt(reason if exit_code == 4 else Reason.NOT_STARTED, f"{detail} (exit status {exit_code})")


def _doubt_about_end(exit_code: int, report: Report) -> Doubt | None:
    end = report.end
    if end is None:
        return Doubt(Reason.NO_END, f"the run ended before pytest finished (exit status {exit_code})")
    if end.exit_status != exit_code:
        detail = f"pytest was to exit with {end.exit_status}, the process exited with {exit_code}"
        return Doubt(Reason.EXIT_FORGED if exit_code == 0 else Reason.EXIT_MISMATCH, detail)
    if exit_code in _UNUSABLE:
        reason, detail = _UNUSABLE[exit_code]
        return Doubt(reason, f"{detail} (exit status {exit_code})")
    failures = len(report.failures)
    if exit_code > 1 or bool(exit_code) != bool(failures):
        detail = f"exit status {exit_code} does not fit {failures} failure{'' if failures == 1 else 's'} in the report"
        return Doubt(Reason.EXIT_MISMATCH, detail)
    return None


def judge(task: Task, run: SuiteRun, flags: tuple[Flag, ...] = ()) -> Grade:
    """Derive the grade from a run.

    A task is resolved if the run is believed, and every FAIL_TO_PASS and PASS_TO_PASS test passed under its exact id.
    Missing, skipped and xfailed tests did not pass. A script's reward of 1 or more resolves the task.

    Args:
        task: the task.
        run: the results of the tests.
        flags: the findings of the screening.
    """
    tests = task.FAIL_TO_PASS + task.PASS_TO_PASS
    if isinstance(task.grader, ScriptGrader):
        return _scored(task, run, flags)
    if run.judgement is not None:
        outcome_of = {test: status.lower() for test, status in run.judgement.statuses.items()}
        failed = run.judgement.failed_fail_to_pass, run.judgement.failed_pass_to_pass
    else:
        outcome_of = run.report.outcomes()
        failed = not_passed(outcome_of, task.FAIL_TO_PASS), not_passed(outcome_of, task.PASS_TO_PASS)
    outcomes = tuple((test, outcome_of.get(test) or run.report.absence(test)) for test in tests)
    reason, detail = _reason(run.doubt, failed)
    return Grade(
        task.instance_id, reason.verdict, reason, detail, outcomes, *failed, flags, run.exit_code, run.duration, run.log
    )


def _scored(task: Task, run: SuiteRun, flags: tuple[Flag, ...]) -> Grade:
    """Derive the grade from a script's reward: 1 or more resolves the task."""
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


def infrastructure_grade(task: Task, error: Exception, flags: tuple[Flag, ...] = ()) -> Grade:
    """Return the grade of an infrastructure error."""
    detail = f"{type(error).__name__}: {error}"
    return Grade(task.instance_id, Verdict.INFRA_ERROR, Reason.INFRASTRUCTURE, detail, flags=flags)
