"""When a run of the tests is believed: the process's fate and the plugin's report have to fit."""

from __future__ import annotations

from dataclasses import dataclass

from minisandbox.grade.report import Report
from minisandbox.grade.verdict import Reason
from minisandbox.types import ExecResult, Outcome

# pytest's exit statuses: pytest.ExitCode, documented in "Exit codes"; the same numbers since pytest 2.8
_UNUSABLE = {
    2: (Reason.INTERRUPTED, "pytest was interrupted"),
    3: (Reason.INTERNAL_ERROR, "pytest had an internal error"),
    4: (Reason.USAGE_ERROR, "pytest refused its command line or could not load a conftest.py"),
    5: (Reason.NO_TESTS, "pytest collected no tests"),
}
# a shell's statuses (POSIX, "Exit Status for Commands"); a wrapper's own 1 or 2 look like pytest's and say less
NOT_FOUND = {
    126: "the task's test command (test.command) cannot be executed",
    127: "a program of the task's test command (test.command) is not there",
}


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a run is not believed.

    Attributes:
        reason: the kind.
        detail: a sentence.
    """

    reason: Reason
    detail: str


def doubt_about(result: ExecResult, report: Report) -> Doubt | None:
    """Return why a run cannot be believed, or None where it can.

    A run is believed if the runner exited by itself, its report is whole, and both say the same: status 0 and no
    failure, or status 1 and at least one failure.

    Args:
        result: the runner's fate.
        report: what the plugin wrote.
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
    return _about_end(result.exit_code, report)


def _not_started(exit_code: int) -> Doubt:
    if exit_code in NOT_FOUND:
        return Doubt(Reason.NOT_STARTED, f"{NOT_FOUND[exit_code]} (exit status {exit_code})")
    reason, detail = _UNUSABLE.get(exit_code, (Reason.NOT_STARTED, "pytest did not start"))
    return Doubt(reason if exit_code == 4 else Reason.NOT_STARTED, f"{detail} (exit status {exit_code})")


def _about_end(exit_code: int, report: Report) -> Doubt | None:
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
