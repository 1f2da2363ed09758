"""Validation: whether a task can be used at all."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue
from minisandbox.grade.grading import grade_reference, grade_untouched
from minisandbox.grade.leaks import Leak, find_leaks
from minisandbox.grade.options import FLAGGED
from minisandbox.grade.report import MISSING, UNCOLLECTED
from minisandbox.grade.verdict import Grade, Reason
from minisandbox.tasks import LogGrader, ScriptGrader, Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

_SEEN_FAILING = frozenset({"failed", "error", UNCOLLECTED})
_BELIEVED = frozenset({Reason.RESOLVED, Reason.TESTS_NOT_PASSED})
# Ways in which a benchmark's own command ends where a file of tests cannot be imported or compiled.
_ENDED_EARLY = frozenset({Reason.INTERRUPTED, Reason.USAGE_ERROR, Reason.NO_TESTS, Reason.NO_RESULTS})


class Status(enum.StrEnum):
    """Whether a task can be used."""

    VALID = "valid"
    INVALID = "invalid"
    ERROR = "error"
    """We could not find out."""


class Cause(enum.StrEnum):
    """Why a task is not valid."""

    REFERENCE_FAILS = "reference_fails"
    EMPTY_RESOLVES = "empty_resolves"
    F2P_NOT_FAILING = "f2p_not_failing"
    P2P_NOT_PASSING = "p2p_not_passing"
    FLAKY = "flaky"
    RUNNER_NOT_SUPPORTED = "runner_not_supported"
    """Its test command runs something whose outcomes nothing here can see: tests in another language."""
    LEAK = "leak"
    """An agent could read the answer in its image."""
    NOT_BUILT = "not_built"
    """Its image could not be made."""
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found out about a task.

    Attributes:
        instance_id: the task's id.
        status: valid, invalid, or error where we could not find out.
        cause: why it is not valid, or None.
        detail: the same in a sentence.
        tests: the tests that the sentence is about.
        flaky: the named tests that did not do the same in all runs.
        reference: the grades of the reference, one per run.
        empty: the grades of the code without any patch, one per run.
        notes: what is odd about a task that is valid by its benchmark's rules.
        leaks: what in its image gives the answer away; not searched for where we could not find out.
    """

    instance_id: str
    status: Status
    cause: Cause | None = None
    detail: str = ""
    tests: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    reference: tuple[Grade, ...] = ()
    empty: tuple[Grade, ...] = ()
    notes: tuple[str, ...] = ()
    leaks: tuple[Leak, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the task can be used."""
        return self.status is Status.VALID


@dataclass(frozen=True, slots=True)
class _Finding:
    cause: Cause
    detail: str
    tests: tuple[str, ...] = ()


def validate(
    task: Task,
    image: Image,
    *,
    runs: int = 1,
    timeout: float | None = None,
    limits: Limits | None = None,
    confirm: str = FLAGGED,
) -> Validation:
    """Check that a task tells a solution from none: several times, to find tests that waver.

    Valid means, in every run: the reference resolves it, the empty patch does not, and without a patch FAIL_TO_PASS
    tests are seen failing: of a benchmark's row (one with a log grader) at least one, of others all. Of others
    every PASS_TO_PASS test passes without a patch, too, and no test wavers; of a benchmark's row these are notes. Every
    run has a fresh sandbox without network. And nothing in the image gives the answer away (:func:`.find_leaks`).

    Args:
        task: the task.
        image: the task's image.
        runs: how often both are run, at least once.
        timeout: seconds the tests may take; the task's own if None.
        limits: what each sandbox may use.
        confirm: whether the reference's passes are confirmed, as for :func:`.grade_reference`.

    Raises:
        InvalidValue: ``runs`` is less than 1, or nothing of ours can run the task's tests.
        GradingError: the image could not be searched.
    """
    if runs < 1:
        raise InvalidValue(f"runs is {runs}", hint="give 1 or more")
    reference = tuple(
        grade_reference(task, image, timeout=timeout, limits=limits, confirm=confirm) for _ in range(runs)
    )
    empty = tuple(grade_untouched(task, image, timeout=timeout, limits=limits) for _ in range(runs))
    flaky = tuple(sorted(_wavering(reference) | _wavering(empty)))
    broken = next((one for one in reference + empty if one.resolved is None), None)
    leaks = find_leaks(task, image) if broken is None else ()
    if not task.patch.strip() and task.solution is None:
        status, finding = Status.INVALID, _Finding(Cause.REFERENCE_FAILS, "it has no reference: no patch, no solution")
    elif broken is not None:
        status, finding = Status.ERROR, _Finding(Cause.INFRASTRUCTURE, broken.detail)
    else:
        found = _finding(task, reference, empty, flaky) or _about_leaks(leaks)
        if found is None:
            notes = _notes(task, empty, flaky) if isinstance(task.grader, LogGrader) else ()
            if isinstance(task.grader, ScriptGrader) and task.grader.mode == "live" and task.grader.carry:
                clean = replace(task, grader=replace(task.grader, mode="fresh"))
                notes = _about_regrade(grade_reference(clean, image, timeout=timeout, limits=limits))
            return Validation(
                task.instance_id, Status.VALID, flaky=flaky, reference=reference, empty=empty, notes=notes
            )
        status, finding = Status.INVALID, found
    return Validation(
        task.instance_id, status, finding.cause, finding.detail, finding.tests, flaky, reference, empty, leaks=leaks
    )


def _finding(task: Task, reference: Sequence[Grade], empty: Sequence[Grade], flaky: tuple[str, ...]) -> _Finding | None:
    """Return the first thing that is wrong with a task, or None."""
    if (found := _about_runner(task, reference[0])) is not None:
        return found
    if any(len({(one.resolved, one.score) for one in runs}) > 1 for runs in (reference, empty)):
        return _Finding(Cause.FLAKY, "the same code resolves it in one run and not in another", flaky)
    if flaky and not isinstance(task.grader, LogGrader):
        return _Finding(Cause.FLAKY, f"{len(flaky)} tests change from run to run", flaky)
    return _about_reference(reference[0]) or _about_empty(task, empty)


def _about_runner(task: Task, reference: Grade) -> _Finding | None:
    """Report a runner that nothing here can listen to; a missing command is the image's fault."""
    unknown = task.grader.reporter != "pytest" and reference.reason is Reason.NOT_STARTED
    if not unknown or reference.exit_code in (126, 127):
        return None
    return _Finding(Cause.RUNNER_NOT_SUPPORTED, f"the test command, {task.grader.command!r}: {reference.detail}")


def _about_leaks(leaks: Sequence[Leak]) -> _Finding | None:
    if not leaks:
        return None
    more = f", and {len(leaks) - 1} more" if len(leaks) > 1 else ""
    return _Finding(Cause.LEAK, f"the image gives the answer away: {leaks[0].place}: {leaks[0].detail}{more}")


def _wavering(runs: Sequence[Grade]) -> set[str]:
    """Return the named tests whose outcome, or whose presence, is not the same in all runs."""
    outcomes = [set(one.outcomes) for one in runs]
    differing = outcomes[0].union(*outcomes[1:]) - outcomes[0].intersection(*outcomes[1:])
    return {test for test, _ in differing}


def _about_reference(graded: Grade) -> _Finding | None:
    if graded.resolved:
        return None
    failed = graded.failed_fail_to_pass + graded.failed_pass_to_pass
    return _Finding(Cause.REFERENCE_FAILS, f"the reference: {graded.reason}: {graded.detail}", failed)


def _about_empty(task: Task, empty: Sequence[Grade]) -> _Finding | None:
    """Report what is wrong with the untouched code's runs.

    A benchmark's rows have the lists that its own validation left: of theirs one FAIL_TO_PASS test that is seen failing
    is enough, and what else is odd is a note.
    """
    if empty[0].resolved:
        return _Finding(Cause.EMPTY_RESOLVES, "every named test passes without any patch", task.FAIL_TO_PASS)
    for run in empty if task.FAIL_TO_PASS else ():
        unseen = not_seen_failing(task, run)
        if len(unseen) == len(task.FAIL_TO_PASS) or (unseen and not isinstance(task.grader, LogGrader)):
            return _not_failing(run, unseen)
        if run.failed_pass_to_pass and not isinstance(task.grader, LogGrader):
            return _Finding(Cause.P2P_NOT_PASSING, _broken(run), run.failed_pass_to_pass)
    return None


def _not_failing(run: Grade, unseen: tuple[str, ...]) -> _Finding:
    if run.reason in _BELIEVED:
        detail = f"without a patch {len(unseen)} FAIL_TO_PASS tests were not seen failing"
    else:
        detail = f"without a patch no test was seen: {run.reason}: {run.detail}"
    return _Finding(Cause.F2P_NOT_FAILING, detail, unseen)


def _broken(run: Grade) -> str:
    return f"without a patch {len(run.failed_pass_to_pass)} PASS_TO_PASS tests do not pass"


def _about_regrade(clean: Grade) -> tuple[str, ...]:
    """Say where a clean sandbox does not share the verdict on the reference."""
    if clean.resolved:
        return ()
    said = f"{clean.reason}: {clean.detail}"
    return (f"what the reference leaves does not pass in a clean sandbox, so that no pass can be confirmed: {said}",)


def _notes(task: Task, empty: Sequence[Grade], flaky: tuple[str, ...]) -> tuple[str, ...]:
    """Say what is odd about a valid row of a benchmark."""
    unseen = tuple(dict.fromkeys(test for run in empty for test in not_seen_failing(task, run)))
    broken = tuple(dict.fromkeys(test for run in empty for test in run.failed_pass_to_pass))
    odd = {
        "FAIL_TO_PASS tests were not seen failing without a patch": unseen,
        "PASS_TO_PASS tests do not pass without a patch": broken,
        "tests change from run to run": flaky,
    }
    return tuple(
        f"{len(tests)} {what}: {', '.join(tests[:3])}{', ...' if len(tests) > 3 else ''}"
        for what, tests in odd.items()
        if tests
    )


def not_seen_failing(task: Task, run: Grade) -> tuple[str, ...]:
    """Return the FAIL_TO_PASS tests that were not seen failing.

    A benchmark's log does not say which tests a module would have had that cannot be imported: there a test that is
    missing counts as failing, if the command's own exit status says that something failed.
    """
    seen = dict(run.outcomes)
    believed = run.reason in (_BELIEVED | _ENDED_EARLY if isinstance(task.grader, LogGrader) else _BELIEVED)
    missing_fails = isinstance(task.grader, LogGrader) and run.exit_code not in (0, None)
    failing = _SEEN_FAILING | {MISSING} if missing_fails else _SEEN_FAILING
    return tuple(test for test in task.FAIL_TO_PASS if not believed or seen.get(test, MISSING) not in failing)
