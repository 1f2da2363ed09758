"""Validation: whether a task can be used at all (DESIGN 4.6)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.grade.grading import grade_reference
from minisandbox.grade.measurement import Measurement, measure
from minisandbox.grade.report import MISSING, PASSED
from minisandbox.grade.runner import files_of
from minisandbox.grade.verdict import Grade, Verdict
from minisandbox.tasks import Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

_SEEN_FAILING = frozenset({"failed", "error"})


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
        reference: the grades of the reference, one per run.
        empty: what the tests did without any patch, one per run.
    """

    instance_id: str
    status: Status
    cause: Cause | None = None
    detail: str = ""
    tests: tuple[str, ...] = ()
    reference: tuple[Grade, ...] = ()
    empty: tuple[Measurement, ...] = ()

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
    task: Task, image: Image, *, runs: int = 1, timeout: float | None = None, limits: Limits | None = None
) -> Validation:
    """Check that a task tells a solution from none: several times, to find tests that waver.

    Valid means, in every run: the reference resolves it, the empty patch does not; without a patch each FAIL_TO_PASS
    test is seen failing, and each PASS_TO_PASS test passes.

    Args:
        task: the task.
        image: the task's image.
        runs: how often both are run, at least once.
        timeout: seconds the tests may take; the task's own if None.
        limits: what each sandbox may use.

    Raises:
        InvalidValue: ``runs`` is less than 1, or the task's tests are not pytest's.
    """
    if runs < 1:
        raise InvalidValue(f"runs is {runs}", hint="give 1 or more")
    files = files_of(task.FAIL_TO_PASS + task.PASS_TO_PASS)
    reference = tuple(grade_reference(task, image, timeout=timeout, limits=limits) for _ in range(runs))
    try:
        empty = tuple(
            measure(task, image, reference=False, files=files, timeout=timeout, limits=limits) for _ in range(runs)
        )
    except (MiniSandboxError, OSError) as error:
        return _error(task, f"{type(error).__name__}: {error}", reference)
    broken = next((one for one in reference if one.verdict is Verdict.INFRA_ERROR), None)
    if broken is not None:
        return _error(task, broken.detail, reference)
    finding = _finding(task, reference, empty)
    if finding is None:
        return Validation(task.instance_id, Status.VALID, reference=reference, empty=empty)
    return Validation(task.instance_id, Status.INVALID, finding.cause, finding.detail, finding.tests, reference, empty)


def _error(task: Task, detail: str, reference: tuple[Grade, ...]) -> Validation:
    return Validation(task.instance_id, Status.ERROR, Cause.INFRASTRUCTURE, detail, reference=reference)


def _finding(task: Task, reference: Sequence[Grade], empty: Sequence[Measurement]) -> _Finding | None:
    """Return the first thing that is wrong with a task, or None."""
    named = frozenset(task.FAIL_TO_PASS + task.PASS_TO_PASS)
    without = [tuple((t, o) for t, o in one.outcomes if t in named) for one in empty]
    wavering = _wavering([one.outcomes for one in reference]) | _wavering(without)
    if wavering or len({one.resolved for one in reference}) > 1:
        return _Finding(Cause.FLAKY, f"{len(wavering)} tests change from run to run", tuple(sorted(wavering)))
    return _about_reference(reference[0]) or _about_empty(task, empty[0])


def _wavering(runs: Sequence[tuple[tuple[str, str], ...]]) -> set[str]:
    """Return the tests whose outcome, or whose presence, is not the same in all runs."""
    differing = set(runs[0]).union(*runs[1:]) - set(runs[0]).intersection(*runs[1:])
    return {test for test, _ in differing}


def _about_reference(graded: Grade) -> _Finding | None:
    if graded.resolved:
        return None
    failed = graded.failed_fail_to_pass + graded.failed_pass_to_pass
    return _Finding(Cause.REFERENCE_FAILS, f"the reference: {graded.reason}: {graded.detail}", failed)


def _about_empty(task: Task, empty: Measurement) -> _Finding | None:
    seen = dict(empty.outcomes)
    if empty.believed and all(seen.get(t) == PASSED for t in task.FAIL_TO_PASS + task.PASS_TO_PASS):
        return _Finding(Cause.EMPTY_RESOLVES, "every named test passes without any patch", task.FAIL_TO_PASS)
    if not empty.believed:
        detail = f"without a patch no test was seen: {empty.reason}: {empty.detail}"
        return _Finding(Cause.F2P_NOT_FAILING, detail, task.FAIL_TO_PASS)
    unseen = tuple(t for t in task.FAIL_TO_PASS if not _seen_failing(t, seen, empty.uncollected))
    if unseen:
        detail = f"without a patch {len(unseen)} FAIL_TO_PASS tests were not seen failing"
        return _Finding(Cause.F2P_NOT_FAILING, detail, unseen)
    broken = tuple(t for t in task.PASS_TO_PASS if seen.get(t) != PASSED)
    if broken:
        return _Finding(Cause.P2P_NOT_PASSING, f"without a patch {len(broken)} PASS_TO_PASS tests do not pass", broken)
    return None


def _seen_failing(test: str, seen: dict[str, str], uncollected: Sequence[str]) -> bool:
    """Whether a test failed, or is missing because what holds it was seen to fail when it was collected."""
    outcome = seen.get(test, MISSING)
    if outcome == MISSING:
        return any(test == place or test.startswith(place + "::") for place in uncollected if place)
    return outcome in _SEEN_FAILING
