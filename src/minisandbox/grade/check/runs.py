"""Checks of runs: the reference and the untouched code, each tested several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from minisandbox.grade.check.evidence import Evidence, Problem, Severity
from minisandbox.grade.report import MISSING
from minisandbox.grade.validation import Cause, Validation, not_seen_failing
from minisandbox.grade.verdict import Grade, Reason
from minisandbox.tasks import LogGrader, ScriptGrader, Task

NEAR = 0.5
"""Share of the time limit from which a loaded machine may reach it."""


def reference_fails(seen: Evidence) -> Iterator[Problem]:
    """The known solution does not pass."""
    found = seen.found
    if _are_uncertain(found.reference):
        return
    run = found.reference[0]
    if not run.judged:
        if run.reason is not Reason.TIMEOUT:
            yield Problem(f"{run.reason}: {run.detail}", _REFERENCE)
    elif isinstance(seen.task.grader, ScriptGrader):
        if not run.resolved:
            yield Problem(run.detail, _REFERENCE)
    elif tests := _steady(found, run.failed_fail_to_pass, but=_missing(found)):
        yield Problem(f"{len(tests)} FAIL_TO_PASS tests do not pass", _REFERENCE, tests)


def reference_breaks_tests(seen: Evidence) -> Iterator[Problem]:
    """PASS_TO_PASS tests pass without a patch and fail with the known solution."""
    found = seen.found
    if _are_judged(found.reference):
        before = found.empty[0].failed_pass_to_pass if _are_judged(found.empty) else ()
        if tests := _steady(found, found.reference[0].failed_pass_to_pass, but=(*_missing(found), *before)):
            yield Problem(f"{len(tests)} PASS_TO_PASS tests do not pass", _REFERENCE, tests)


def missing_test(seen: Evidence) -> Iterator[Problem]:
    """The lists name tests that do not exist."""
    if tests := _missing(seen.found):
        yield Problem(f"{len(tests)} named tests do not exist", _REFERENCE, tests)


def empty_resolves(seen: Evidence) -> Iterator[Problem]:
    """The untouched code passes."""
    if all(run.resolved for run in seen.found.empty):
        yield Problem("everything passes without any patch", _EMPTY)


def f2p_not_failing(seen: Evidence) -> Iterator[Problem]:
    """FAIL_TO_PASS tests do not fail without a patch."""
    found = seen.found
    if not seen.task.FAIL_TO_PASS or _are_uncertain(found.empty) or found.empty[0].resolved:
        return
    run = found.empty[0]
    if run.reason is Reason.TIMEOUT or not found.reference[0].judged:
        return
    tests = _steady(found, not_seen_failing(seen.task, run), but=_missing(found))
    if tests and not run.judged:
        yield Problem(f"no test was seen: {run.reason}: {run.detail}", _EMPTY, tests)
    elif tests:
        yield Problem(f"{len(tests)} FAIL_TO_PASS tests do not fail", _EMPTY, tests, _softer(seen.task, found))


def p2p_not_passing(seen: Evidence) -> Iterator[Problem]:
    """PASS_TO_PASS tests fail without a patch."""
    found = seen.found
    if not _are_judged(found.empty):
        return
    if tests := _steady(found, found.empty[0].failed_pass_to_pass, but=_missing(found)):
        yield Problem(f"{len(tests)} PASS_TO_PASS tests do not pass", _EMPTY, tests, _softer(seen.task, found))


def flaky(seen: Evidence) -> Iterator[Problem]:
    """The same code gives different results."""
    found = seen.found
    if _ended(seen, Reason.TIMEOUT):
        return
    if any(len({(run.resolved, run.score) for run in runs}) > 1 for runs in (found.reference, found.empty)):
        yield Problem("the same code resolves it in one run and not in another", tests=found.flaky)
    elif found.flaky:
        what = f"{len(found.flaky)} tests change from run to run"
        yield Problem(what, tests=found.flaky, severity=_softer(seen.task, found))


def order_dependent(seen: Evidence) -> Iterator[Problem]:
    """The known solution does not pass if the test files run in another order."""
    run = seen.reordered
    if run is not None and run.resolved is False and seen.found.reference[0].resolved:
        tests = run.failed_fail_to_pass + run.failed_pass_to_pass
        yield Problem(f"with the test files in reverse order: {run.detail}", _REFERENCE, tests)


def timeout(seen: Evidence) -> Iterator[Problem]:
    """The tests reach their time limit."""
    for where, run in _ended(seen, Reason.TIMEOUT).items():
        yield Problem(f"{run.detail} (limit {seen.timeout:g} s)", where)


def near_timeout(seen: Evidence) -> Iterator[Problem]:
    """The tests take more than half of their time limit."""
    found = seen.found
    if _ended(seen, Reason.TIMEOUT):
        return
    # the time of a task's own solution is not the verifier's
    runs = found.empty if isinstance(seen.task.grader, ScriptGrader) else found.reference + found.empty
    longest = max(run.duration for run in runs)
    if longest > NEAR * seen.timeout:
        yield Problem(f"the longest run took {longest:.0f} s of {seen.timeout:g} s")


def no_reward(seen: Evidence) -> Iterator[Problem]:
    """The verifier writes no reward."""
    for where, run in list(_ended(seen, Reason.NO_REWARD).items())[:1]:
        yield Problem(run.detail, where)


def misread_log(seen: Evidence) -> Iterator[Problem]:
    """The benchmark's parser misreads the log of the known solution."""
    for misreading in seen.found.reference[0].misread:
        yield Problem(misreading.what, "test.parser", misreading.tests)


def not_confirmable(seen: Evidence) -> Iterator[Problem]:
    """Passes in the agent's sandbox cannot be confirmed in a clean one."""
    if isinstance(seen.task.grader, ScriptGrader):
        yield from map(Problem, seen.found.notes)


def writable_verifier(seen: Evidence) -> Iterator[Problem]:
    """An agent can replace a file that decides the reward."""
    for path in seen.forged:
        yield Problem("an agent can write it, and with a forged copy the untouched code passes", path)


def infrastructure(seen: Evidence) -> Iterator[Problem]:
    """The check itself failed."""
    if seen.failure is not None:
        yield Problem(f"{type(seen.failure).__name__}: {seen.failure}")
        return
    runs = seen.found.reference + seen.found.empty
    unsure = (run.detail for run in runs if run.resolved is None and run.reason is not Reason.NO_REWARD)
    yield from map(Problem, list(unsure)[:1])


_REFERENCE = "with the reference"
_EMPTY = "without a patch"


def _softer(task: Task, found: Validation) -> Severity | None:
    """Return the severity of what is odd about a benchmark's row whose own rule holds."""
    holds = found.valid or found.cause is Cause.LEAK
    return Severity.WARNING if holds and isinstance(task.grader, LogGrader) else None


def _are_judged(runs: Iterable[Grade]) -> bool:
    """Whether runs say what became of each test."""
    return all(run.judged for run in runs)


def _are_uncertain(runs: Sequence[Grade]) -> bool:
    """Whether runs of the same code have different results, and not for their tests, or are no statement about it."""
    results = {run.resolved for run in runs}
    return None in results or (len(results) > 1 and not _are_judged(runs))


def _steady(found: Validation, tests: Iterable[str], *, but: Iterable[str] = ()) -> tuple[str, ...]:
    """Leave out tests that change from run to run, and others."""
    others = {*found.flaky, *but}
    return tuple(test for test in tests if test not in others)


def _missing(found: Validation) -> tuple[str, ...]:
    """Return the named tests that do not exist with the reference."""
    run = found.reference[0]
    absent = {test for test, outcome in run.outcomes if outcome == MISSING}
    failed = run.failed_fail_to_pass + run.failed_pass_to_pass if run.reason is Reason.TESTS_NOT_PASSED else ()
    return _steady(found, (test for test in failed if test in absent))


def _ended(seen: Evidence, reason: Reason) -> dict[str, Grade]:
    """Return where runs ended for a reason, with the first such run."""
    sides = {_REFERENCE: seen.found.reference, _EMPTY: seen.found.empty}
    return {where: run for where, runs in sides.items() for run in runs[::-1] if run.reason is reason}
