"""Comparing our verdicts with the official ones, and saying how many are equal."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.parity.cases import REFERENCE, VARIANTS, Case

from minisandbox.grade import Verdict


class Standing(enum.StrEnum):
    """How a verdict of ours stands to the official one for the same log."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_BELIEVED = "not believed"
    """The run is not believed: what its log says is not what we say."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A case beside the official verdict.

    Attributes:
        case: the case.
        standing: how they stand.
        official: whether the official rules call it resolved; None where they could not say, or there is no log.
        tests: the named tests about which the two say different things, though not for an unbelieved run.
        error: what kept the official package from a verdict.
    """

    case: Case
    standing: Standing
    official: bool | None
    tests: tuple[str, ...] = ()
    error: str = ""


def compare(case: Case, named: Sequence[str], verdict: Mapping[str, Any] | None) -> Compared:
    """Compare a case with the official verdict.

    Equal means: both resolved or both not, and the same tests passed.

    Args:
        case: the case.
        named: the task's FAIL_TO_PASS and PASS_TO_PASS.
        verdict: what ``official_verdicts.py`` says of the log, or None where there is none.
    """
    error = "" if verdict is None else verdict.get("error", "")
    official = None if verdict is None or error else bool(verdict["resolved"])
    if case.doubt:
        return Compared(case, Standing.NOT_BELIEVED, official, error=error)
    if verdict is None or official is None:
        return Compared(case, Standing.DIFFERENT, None, error=error or "no log was kept")
    passed = {test for tests in verdict["passed"].values() for test in tests}
    tests = tuple(test for test in named if (test in passed) is (test in set(case.not_passed)))
    equal = official is (case.verdict == Verdict.RESOLVED) and not tests
    return Compared(case, Standing.EQUAL if equal else Standing.DIFFERENT, official, tests)


def table(found: Sequence[Compared], left_out: Mapping[str, str]) -> str:
    """Return the cases as a table in Markdown, a row for each task.

    Args:
        found: the cases.
        left_out: tasks that were not graded, with the reason.
    """
    cells: dict[str, dict[str, str]] = {}
    for one in found:
        cells.setdefault(one.case.instance_id, {})[one.case.variant] = _cell(one)
    lines = [f"| task | {' | '.join(VARIANTS)} |", "|---|" + "---|" * len(VARIANTS)]
    lines += [f"| {task} | {' | '.join(row.get(name, '') for name in VARIANTS)} |" for task, row in cells.items()]
    lines += [f"| {task} | {why} |{' |' * (len(VARIANTS) - 1)}" for task, why in left_out.items()]
    return "\n".join(lines)


def _cell(one: Compared) -> str:
    if one.standing is Standing.NOT_BELIEVED:
        return f"({one.case.reason})"
    word = one.case.verdict
    return word if one.standing is Standing.EQUAL else f"**{word}, officially {_word(one.official)}**"


def _word(resolved: bool | None) -> str:
    return "unknown" if resolved is None else "resolved" if resolved else "not resolved"


def summary(found: Sequence[Compared], against: str) -> list[str]:
    """Return lines: how many are equal, each case that is not, and each unbelieved run that should have been.

    Args:
        found: the cases.
        against: the packages that gave the official verdicts.
    """
    counts = Counter(one.standing for one in found)
    believed = counts[Standing.EQUAL] + counts[Standing.DIFFERENT]
    share = 100 * counts[Standing.EQUAL] / believed if believed else 0.0
    doubted = [one for one in found if one.standing is Standing.NOT_BELIEVED]
    references = sum(one.case.variant == REFERENCE for one in doubted)
    resolved = sum(one.official is True for one in doubted)
    same = sum(one.official is (one.case.verdict == Verdict.RESOLVED) for one in found)
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in Counter(one.case.reason for one in doubted).most_common()
    )
    said = [
        f"Against {against}:",
        "",
        f"- {counts[Standing.EQUAL]} of {believed} verdicts on believed runs are equal ({share:.1f} %)",
        f"- {len(doubted)} runs are not believed ({reasons or 'none'}), {references} of them with the reference",
        f"- {resolved} of those are officially resolved",
        f"- {same} of {len(found)} verdicts, believed or not, agree on whether the task is resolved",
    ]
    for one in found:
        where = f"{one.case.instance_id} {one.case.variant}"
        if one.standing is Standing.DIFFERENT:
            about = one.error or f"{len(one.tests)} tests differ: {', '.join(one.tests[:5])}"
            said.append(f"- different: {where}: ours {one.case.verdict}, officially {_word(one.official)}; {about}")
        elif one.standing is Standing.NOT_BELIEVED and (one.official is not False or one.case.variant == REFERENCE):
            said.append(f"- not believed: {where}: {one.case.doubt[:200]}; officially {_word(one.official)}")
    return said


def beside(cases: Sequence[Case], others: Mapping[str, Case]) -> list[str]:
    """Return lines: how many cases had the same verdict and the same passed tests in another environment, and the rest.

    Args:
        cases: the cases.
        others: those of the other environment, by name.
    """
    both = [(case, others[case.name]) for case in cases if case.name in others]
    said: list[str] = []
    for case, other in both:
        tests = sorted(set(case.not_passed) ^ set(other.not_passed))
        if (case.verdict, case.reason) != (other.verdict, other.reason) or tests:
            words = f"{case.verdict} ({case.reason}), there {other.verdict} ({other.reason})"
            said.append(f"- other outcome: {case.name}: {words}; {len(tests)} tests differ: {', '.join(tests[:5])}")
    same = len(both) - len(said)
    return [f"- {same} of {len(both)} runs have the same verdict, reason and passed tests in both environments", *said]


def is_parity(found: Sequence[Compared]) -> bool:
    """Whether all believed verdicts are equal, and every run with the reference is believed."""
    return bool(found) and all(
        one.standing is Standing.EQUAL or (one.standing is Standing.NOT_BELIEVED and one.case.variant != REFERENCE)
        for one in found
    )
