"""Validate tasks: check that grading distinguishes a task's solution from no solution."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue
from minisandbox.grade.confirm.changeable import changeable_tests
from minisandbox.grade.grading import grade_reference, grade_untouched
from minisandbox.grade.judging import NOT_FOUND
from minisandbox.grade.leaks import Leak, find_leaks
from minisandbox.grade.options import ALWAYS, NEVER, ONCE
from minisandbox.grade.report import FAILING, MISSING, UNCOLLECTED
from minisandbox.grade.verdict import REPEATED, Grade, Reason
from minisandbox.grade.workspace import Workspace
from minisandbox.tasks import LogGrader, ScriptGrader, Task
from minisandbox.tasks.harness import Misreading
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

_SEEN_FAILING = FAILING | {UNCOLLECTED}
# Reasons with which a benchmark's own command may end if a test file cannot be imported or compiled.
_ENDED_EARLY = frozenset({Reason.INTERRUPTED, Reason.USAGE_ERROR, Reason.NO_TESTS, Reason.NO_RESULTS})


_Fault = tuple["Cause", str, tuple[str, ...]]
"""The cause that makes a task invalid, a sentence about it, and the affected tests."""


class Status(enum.StrEnum):
    """Whether a task can be used."""

    VALID = "valid"
    INVALID = "invalid"
    ERROR = "error"
    """The infrastructure failed."""


class Cause(enum.StrEnum):
    """Why a task is not valid."""

    REFERENCE_FAILS = "reference_fails"
    EMPTY_RESOLVES = "empty_resolves"
    F2P_NOT_FAILING = "f2p_not_failing"
    P2P_NOT_PASSING = "p2p_not_passing"
    FLAKY = "flaky"
    RUNNER_NOT_SUPPORTED = "runner_not_supported"
    """No reporter can observe the test command, e.g. a command for another language."""
    LEAK = "leak"
    """The image contains the solution or the hidden tests."""
    NOT_BUILT = "not_built"
    """The image could not be built."""
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class ChangeableShare:
    """The number of FAIL_TO_PASS tests with one kind of changeable expectation.

    Attributes:
        kind: a value of :class:`.Kind`; ``none`` for unchangeable tests.
        tests: the number of tests.
    """

    kind: str
    tests: int


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether a task can be used.

    Attributes:
        instance_id: the task's id.
        status: valid, invalid, or error if the infrastructure failed.
        cause: why the task is not valid, or None.
        detail: the cause in a sentence.
        tests: the affected tests.
        flaky: the named tests whose outcomes differ between runs.
        notes: misreadings of the benchmark's parser, and oddities of a valid task.
        changeable: the numbers of FAIL_TO_PASS tests by the kind of expectation that confirming runs can change; only
            for a valid task.
    """

    instance_id: str
    status: Status
    cause: Cause | None = None
    detail: str = ""
    tests: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changeable: tuple[ChangeableShare, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the task can be used."""
        return self.status is Status.VALID


@dataclass(frozen=True, slots=True)
class Validation(Validity):
    """The full result of validating a task.

    Attributes:
        reference: the grades of the reference, one per run.
        empty: the grades of the code without any patch, one per run.
        leaks: the leaks in the image; there is no search after an infrastructure error.
    """

    reference: tuple[Grade, ...] = ()
    empty: tuple[Grade, ...] = ()
    leaks: tuple[Leak, ...] = ()


def validate(
    task: Task,
    image: Image,
    *,
    runs: int = 1,
    timeout: float | None = None,
    limits: Limits | None = None,
    confirm: str = ONCE,
) -> Validation:
    """Check that a task distinguishes its solution from no solution; several runs find flaky tests.

    A task is valid if all of this holds in every run:

    - The reference resolves the task, and the empty patch does not.
    - Without a patch, every FAIL_TO_PASS test is seen failing and every PASS_TO_PASS test passes.
    - No test is flaky.

    For a benchmark's row (with a log grader), one failing FAIL_TO_PASS test is enough; other deviations become notes.
    Every run has a fresh sandbox without a network. The image must not contain the solution (:func:`.find_leaks`).

    Args:
        task: the task.
        image: the task's image.
        runs: the number of runs of the reference, and of the empty patch; at least 1.
        timeout: the time limit of the tests in seconds; None for the task's own.
        limits: the limits of each sandbox.
        confirm: ``always`` also confirms the reference's passes; ``share(0)`` skips the search for changeable tests.

    Raises:
        InvalidValue: ``runs`` is less than 1, or no runner supports the task's tests.
        GradingError: the image could not be searched for leaks.
    """
    if runs < 1:
        raise InvalidValue(f"runs is {runs}", hint="give 1 or more")
    policy = ALWAYS if confirm == ALWAYS else NEVER
    reference = tuple(grade_reference(task, image, timeout=timeout, limits=limits, confirm=policy) for _ in range(runs))
    empty = tuple(grade_untouched(task, image, timeout=timeout, limits=limits) for _ in range(runs))
    flaky = tuple(sorted(_wavering(reference) | _wavering(empty)))
    undecided = next((grade for grade in reference + empty if grade.resolved is None), None)
    leaks = find_leaks(task, image) if undecided is None else ()
    notes = tuple(_about_misreading(task, misreading) for misreading in reference[0].misread)
    validation = Validation(
        task.instance_id, Status.VALID, flaky=flaky, notes=notes, reference=reference, empty=empty, leaks=leaks
    )
    if undecided is not None and _has_reference(task):
        return replace(validation, status=Status.ERROR, cause=Cause.INFRASTRUCTURE, detail=undecided.detail)
    if (fault := next(_faults(task, validation), None)) is not None:
        cause, detail, tests = fault
        return replace(validation, status=Status.INVALID, cause=cause, detail=detail, tests=tests)
    if isinstance(task.grader, ScriptGrader) and task.grader.mode == "live" and task.grader.carry:
        fresh_task = replace(task, grader=replace(task.grader, mode="fresh"))
        regrade = grade_reference(fresh_task, image, timeout=timeout, limits=limits)
        return replace(validation, notes=_about_regrade(regrade))
    notes += _repetitions(reference + empty)
    if isinstance(task.grader, LogGrader):
        notes += _notes(task, empty, flaky)
    if confirm == NEVER or task.grader.reporter == "none":
        return replace(validation, notes=notes)
    changeable = changeable_tests(Workspace.of(task, image, timeout=timeout, limits=limits))
    if changeable.doubt:
        notes += (f"the reference's run on changed tests is not believed: {changeable.doubt}",)
    shares = tuple(
        ChangeableShare(kind, count) for kind, count in sorted(changeable.by_kind(len(task.FAIL_TO_PASS)).items())
    )
    return replace(validation, notes=notes, changeable=shares)


def _repetitions(runs: Sequence[Grade]) -> tuple[str, ...]:
    """Return notes about runs that had to be repeated."""
    return tuple(dict.fromkeys(flag.detail for run in runs for flag in run.flags if flag.kind == REPEATED))


def _has_reference(task: Task) -> bool:
    return bool(task.patch.strip()) or task.solution is not None


def _wavering(runs: Sequence[Grade]) -> set[str]:
    """Return the named tests whose outcome or presence differs between runs."""
    outcomes = [set(run.outcomes) for run in runs]
    differing = outcomes[0].union(*outcomes[1:]) - outcomes[0].intersection(*outcomes[1:])
    return {test for test, _ in differing}


def _faults(task: Task, validation: Validation) -> Iterator[_Fault]:
    """Yield the faults of a task; the first is reported."""
    reference = validation.reference[0]
    if not _has_reference(task):
        yield Cause.REFERENCE_FAILS, "it has no reference: no patch, no solution", ()
    is_unreported = task.grader.reporter != "pytest" and reference.reason is Reason.NOT_STARTED
    if is_unreported and reference.exit_code not in NOT_FOUND:  # a missing program is a fault of the image
        yield Cause.RUNNER_NOT_SUPPORTED, f"the test command, {task.grader.command!r}: {reference.detail}", ()
    if any(len({(run.resolved, run.score) for run in runs}) > 1 for runs in (validation.reference, validation.empty)):
        yield Cause.FLAKY, "the same code resolves it in one run and not in another", validation.flaky
    if validation.flaky and not isinstance(task.grader, LogGrader):
        yield Cause.FLAKY, f"{len(validation.flaky)} tests change from run to run", validation.flaky
    if not reference.resolved:
        failed = reference.failed_fail_to_pass + reference.failed_pass_to_pass
        yield Cause.REFERENCE_FAILS, f"the reference: {reference.reason}: {reference.detail}", failed
    if validation.empty[0].resolved:
        yield Cause.EMPTY_RESOLVES, "every named test passes without any patch", task.FAIL_TO_PASS
    for run in validation.empty if task.FAIL_TO_PASS else ():
        yield from _faults_of_empty(task, run)
    for leak in validation.leaks:
        remaining_leaks = f", and {len(validation.leaks) - 1} more" if len(validation.leaks) > 1 else ""
        yield Cause.LEAK, f"the image gives the answer away: {leak.place}: {leak.detail}{remaining_leaks}", ()


def _faults_of_empty(task: Task, run: Grade) -> Iterator[_Fault]:
    """Yield the faults that a run of the untouched code shows.

    A benchmark's rows passed the benchmark's own validation. So one failing FAIL_TO_PASS test is enough, and other
    deviations become notes.
    """
    not_failing, failed_tests = not_seen_failing(task, run), run.failed_pass_to_pass
    is_benchmark = isinstance(task.grader, LogGrader)
    if len(not_failing) == len(task.FAIL_TO_PASS) or (not_failing and not is_benchmark):
        problem = f"{len(not_failing)} FAIL_TO_PASS tests were not seen failing"
        problem = problem if run.judged else f"no test was seen: {run.reason}: {run.detail}"
        yield Cause.F2P_NOT_FAILING, f"without a patch {problem}", not_failing
    if failed_tests and not is_benchmark:
        yield Cause.P2P_NOT_PASSING, f"without a patch {len(failed_tests)} PASS_TO_PASS tests do not pass", failed_tests


def _about_regrade(clean_grade: Grade) -> tuple[str, ...]:
    """Return a note if the reference's files do not pass in a clean sandbox."""
    if clean_grade.resolved:
        return ()
    reason = f"{clean_grade.reason}: {clean_grade.detail}"
    return (f"what the reference leaves does not pass in a clean sandbox, so that no pass can be confirmed: {reason}",)


def _about_misreading(task: Task, misreading: Misreading) -> str:
    assert isinstance(task.grader, LogGrader)
    return f"{task.grader.parser}: {_with_tests(misreading.what, misreading.tests)}"


def _with_tests(sentence: str, tests: Sequence[str]) -> str:
    """Append the first tests to a sentence about them."""
    return f"{sentence}: {', '.join(tests[:3])}{', ...' if len(tests) > 3 else ''}" if tests else sentence


def _notes(task: Task, empty: Sequence[Grade], flaky: tuple[str, ...]) -> tuple[str, ...]:
    """Return notes about a benchmark's row that is valid."""
    not_failing = tuple(dict.fromkeys(test for run in empty for test in not_seen_failing(task, run)))
    failed_tests = tuple(dict.fromkeys(test for run in empty for test in run.failed_pass_to_pass))
    deviations = {
        "FAIL_TO_PASS tests were not seen failing without a patch": not_failing,
        "PASS_TO_PASS tests do not pass without a patch": failed_tests,
        "tests change from run to run": flaky,
    }
    return tuple(_with_tests(f"{len(tests)} {deviation}", tests) for deviation, tests in deviations.items() if tests)


def not_seen_failing(task: Task, run: Grade) -> tuple[str, ...]:
    """Return the FAIL_TO_PASS tests that were not seen failing.

    A benchmark's log does not list the tests of a module that cannot be imported. So a missing test counts as failing
    if the exit status of the command reports a failure.
    """
    outcomes = dict(run.outcomes)
    by_log = isinstance(task.grader, LogGrader)
    believed = run.judged or (by_log and run.reason in _ENDED_EARLY)
    failing = _SEEN_FAILING | {MISSING} if by_log and run.exit_code not in (0, None) else _SEEN_FAILING
    return tuple(test for test in task.FAIL_TO_PASS if not believed or outcomes.get(test, MISSING) not in failing)
