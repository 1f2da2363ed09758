"""Runs of tests: what one of them showed, whichever runner it was."""

from __future__ import annotations

from dataclasses import dataclass

from minisandbox.grade.belief import Doubt
from minisandbox.grade.report import Report
from minisandbox.tasks.harness import Judgement
from minisandbox.types import ExecResult

_LOG_TAIL = 16_000


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What one run of the tests showed.

    Attributes:
        report: what the plugin wrote.
        doubt: why the run is not believed, or None.
        exit_code: the runner's exit status, or None where it had none or did not run.
        duration: seconds the runner took.
        log: the end of its output.
        judgement: what the benchmark's own parser and rules make of the output; None where the report decides.
        whole_log: the output, where they read it.
        reward: what a script wrote; None where tests decide.
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
        """A run that did not come to pass."""
        return cls(Report(), doubt, log=log)


def log_of(result: ExecResult) -> str:
    """Return the end of what a command printed, with its fate."""
    parts = (result.stdout, result.stderr)
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
    return f"{text[-_LOG_TAIL:]}\n[{result.fate}]"
