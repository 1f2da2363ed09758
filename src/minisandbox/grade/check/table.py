"""The table of checks: name, severity, and what to do about its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from minisandbox.grade.check import image, rows, runs
from minisandbox.grade.check.evidence import Evidence, Problem, Severity

_ERROR, _WARNING = Severity


@dataclass(frozen=True, slots=True)
class Check:
    """A question that a careful maintainer asks of each task.

    Attributes:
        find: yields what is wrong; its name is the check's, and its docstring says what the check finds.
        severity: of its findings, where they have no other.
        advice: what to do about a finding.
    """

    find: Callable[[Evidence], Iterable[Problem]]
    severity: Severity
    advice: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.find.__name__


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a task.

    Attributes:
        task: the task's id; of a row that is no task, where the row is.
        check: the name of the check.
        severity: how bad it is.
        where: the file, the field or the run that it is about; "" where the check's name says it.
        what: what is wrong, in a sentence.
        tests: the tests that it is about.
    """

    task: str
    check: str
    severity: Severity
    where: str
    what: str
    tests: tuple[str, ...] = ()


def unusable_row(_: Evidence) -> Iterator[Problem]:
    """The row is not a task."""
    yield from ()  # there is no task to look at: `check_set` makes these findings of the reader's errors


ROWS = (
    Check(unusable_row, _ERROR, "fix the field that the message names, or leave the row out"),
    Check(rows.empty_instruction, _ERROR, "say what the agent has to do"),
    Check(rows.solution_in_instruction, _ERROR, "take the reference's lines out of the instruction"),
    Check(rows.no_reference, _ERROR, "add a patch or a solution, or leave the task out"),
    Check(rows.duplicate, _WARNING, "leave one of them out: it counts twice"),
    Check(rows.tests_in_patch, _WARNING, "move the tests to a file that only test_patch touches"),
    Check(rows.unpinned, _WARNING, "pin it: NAME@sha256:..., a whole commit id, PACKAGE==VERSION"),
)  # fmt: skip
"""Checks that a row alone is enough for."""

RUNS = (
    Check(image.not_built, _ERROR, "fix the recipe; `image build --shell` opens the failed step"),
    Check(image.slow_build, _WARNING, "pin requirements in build.requirements, which tasks share"),
    Check(image.solution_in_image, _ERROR, "remove the file: build.remove, or the recipe"),
    Check(image.tests_in_image, _ERROR, "remove the file: build.remove, or the recipe"),
    Check(image.history_in_image, _ERROR, "cut the history (build.cut), or remove the other clone"),
    Check(image.archive_in_image, _ERROR, "remove the archive from the image"),
    Check(runs.reference_fails, _ERROR, "correct the patch or the image; `validate -o` keeps the log"),
    Check(runs.reference_breaks_tests, _ERROR, "correct the patch or PASS_TO_PASS"),
    Check(runs.missing_test, _ERROR, "correct the tests' names, or take them out of the lists"),
    Check(runs.empty_resolves, _ERROR, "name a test that fails without the patch"),
    Check(runs.f2p_not_failing, _ERROR, "move the tests to PASS_TO_PASS, or correct them"),
    Check(runs.p2p_not_passing, _ERROR, "take the tests out of PASS_TO_PASS"),
    Check(runs.flaky, _ERROR, "take the tests out of the lists, or fix their clock, seed or port"),
    Check(runs.order_dependent, _WARNING, "make the tests independent, or take them out of the lists"),
    Check(runs.timeout, _ERROR, "raise test.timeout, or take the slow tests out of the lists"),
    Check(runs.near_timeout, _WARNING, "raise test.timeout to four times what the tests take"),
    Check(runs.no_reward, _ERROR, "let the verifier write a reward whatever happens, 0 first"),
    Check(runs.misread_log, _WARNING, "change test.command or the tests' names; docs/reference/graders.md"),
    Check(runs.not_confirmable, _WARNING, "let the work stay in the working directory or in artifacts"),
    Check(runs.writable_verifier, _ERROR, "move the file to tests/, which the grader brings"),
    Check(runs.infrastructure, _ERROR, "repeat the command; `minisandbox doctor` checks this machine"),
)  # fmt: skip
"""Checks that take an image, and runs of the tests."""

CHECKS: Mapping[str, Check] = {check.name: check for check in (*ROWS, *RUNS)}
"""All checks, by name, in the order of reports."""


def findings(seen: Evidence, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Return what some checks find in a task."""
    return tuple(
        Finding(seen.task.instance_id, check.name, one.severity or check.severity, one.where, one.what, one.tests)
        for check in checks
        for one in check.find(seen)
    )
