"""Measure the outcomes of a project's tests on clean code, with and without the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisandbox.grade.graders.log import about
from minisandbox.grade.judging import SuiteRun
from minisandbox.grade.report import PASSED
from minisandbox.grade.submission import CodePatch, reference_change
from minisandbox.grade.verdict import Reason
from minisandbox.grade.workspace import Workspace
from minisandbox.tasks import LogGrader, Task, harness
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image


@dataclass(frozen=True, slots=True)
class Measurement:
    """The results of one run of the tests.

    Attributes:
        outcomes: every reported test with its outcome, in execution order.
        uncollected: files and classes that could not be collected.
        reason: why the run is not believed, or None.
        detail: the reason in a sentence.
        exit_code: the runner's exit status, or None if it was killed.
        duration: the duration of the run in seconds.
        versions: the versions of Python and pytest in the sandbox, for display only.
        log: the end of the runner's output.
    """

    outcomes: tuple[tuple[str, str], ...]
    uncollected: tuple[str, ...]
    reason: Reason | None
    detail: str
    exit_code: int | None
    duration: float
    versions: str
    log: str

    @property
    def believed(self) -> bool:
        """Whether the run is believed: its exit status fits the report."""
        return self.reason is None

    @property
    def passed(self) -> frozenset[str]:
        """The tests that passed."""
        return frozenset(test for test, outcome in self.outcomes if outcome == PASSED)


def measure(
    task: Task,
    image: Image,
    *,
    reference: bool,
    files: Sequence[str] = (),
    timeout: float | None = None,
    limits: Limits | None = None,
) -> Measurement:
    """Run the tests of a project on clean code, as grading does.

    Args:
        task: the task; its lists of tests are ignored.
        image: the task's image.
        reference: whether the reference is applied first.
        files: test files to run; empty if the test command chooses.
        timeout: the time limit of the tests in seconds; None for the task's own.
        limits: the limits of the sandbox.

    Returns:
        The results; check ``believed`` before you use them.

    Raises:
        MiniSandboxError: the sandbox could not be created, or ended.
    """
    workspace = Workspace.of(task, image, files=files, timeout=timeout, limits=limits)
    run = workspace.run(reference_change(task) if reference else CodePatch())
    doubt = run.doubt
    return Measurement(
        tuple(_outcomes(task, run).items()),
        run.report.uncollected,
        None if doubt is None else doubt.reason,
        "" if doubt is None else doubt.detail,
        run.exit_code,
        run.duration,
        run.report.versions,
        run.log,
    )


def _outcomes(task: Task, run: SuiteRun) -> dict[str, str]:
    """Return the outcome of every test; for a log grader, under the names that the benchmark's parser returns."""
    if run.judgement is None or not isinstance(task.grader, LogGrader):
        return run.report.outcomes()
    statuses = harness.parse(task.grader.parser, run.whole_log, about=about(task))
    return {test: status.lower() for test, status in statuses.items()}


def derive_test_lists(
    solved: Sequence[Measurement], unsolved: Sequence[Measurement]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Derive FAIL_TO_PASS and PASS_TO_PASS from measurements.

    Args:
        solved: runs with the reference, at least one.
        unsolved: runs without it, at least one.

    Returns:
        The tests that passed in every run with the reference and in no run without it, then the tests that passed in
        every run. Flaky tests are in neither list. Both lists are in execution order.
    """
    always_solved = frozenset.intersection(*(run.passed for run in solved))
    always_without = frozenset.intersection(*(run.passed for run in unsolved))
    ever_without = frozenset[str]().union(*(run.passed for run in unsolved))
    solved_tests = [test for test, _ in solved[0].outcomes if test in always_solved]
    return tuple(test for test in solved_tests if test not in ever_without), tuple(
        test for test in solved_tests if test in always_without
    )
