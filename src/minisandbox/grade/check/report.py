"""The reports of a check: for programs, and for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from minisandbox.grade.check.evidence import Severity
from minisandbox.grade.check.sets import Checked
from minisandbox.grade.check.table import CHECKS, Finding
from minisandbox.grade.sets.reports import markdown_table, write_reports

_SEVERITIES, _NAMES = list(Severity), list(CHECKS)
_MEASURED = ("build_seconds", "test_seconds", "seconds")


def write_check_reports(out: Path, checked: Sequence[Checked]) -> None:
    """Write ``report.json`` and ``report.md``.

    Args:
        out: the run directory.
        checked: what is known of the tasks.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_reports(out, check_report(checked), check_table(checked))


def all_findings(checked: Sequence[Checked]) -> list[Finding]:
    """Return the findings of all tasks: errors first, then by check, then in the order of the tasks."""
    found = [finding for one in checked for finding in one.findings]
    return sorted(found, key=lambda one: (_SEVERITIES.index(one.severity), _NAMES.index(one.check)))


def check_report(checked: Sequence[Checked]) -> dict[str, object]:
    """Return the report for programs; what differs from run to run is under ``measured`` alone.

    Args:
        checked: what is known of the tasks.
    """
    found = all_findings(checked)
    results = []
    for one in checked:
        row = asdict(one) | {"findings": [finding.check for finding in one.findings]}
        results.append(row | {"measured": {name: row.pop(name) for name in _MEASURED}})
    return {
        "format": "minisandbox-check-report",
        "version": 1,
        "tasks": len(checked),
        "counts": {severity: sum(one.severity is severity for one in found) for severity in Severity},
        "checks": Counter(one.check for one in found),
        "findings": [asdict(one) | {"advice": CHECKS[one.check].advice} for one in found],
        "results": results,
    }


def summary(checked: Sequence[Checked]) -> str:
    """Return what was found in all, in one line."""
    counts = Counter(one.severity for one in all_findings(checked))
    words = (f"{counts[one]} {one}{'' if counts[one] == 1 else 's'}" for one in Severity)
    found = " and ".join(words) if counts else "no findings"
    ran = sum(one.ran for one in checked)
    return f"{len(checked)} tasks checked, {ran} of them with their images and tests: {found}"


def about(finding: Finding) -> str:
    """Return where and what a finding is, with the first tests it concerns."""
    tests = f" ({', '.join(finding.tests[:2])}{', ...' if len(finding.tests) > 2 else ''})" if finding.tests else ""
    return (f"{finding.where}: " if finding.where else "") + finding.what + tests


def check_table(checked: Sequence[Checked]) -> str:
    """Return the report for people, in Markdown.

    Args:
        checked: what is known of the tasks.
    """
    found = all_findings(checked)
    lines = [summary(checked) + ".", ""]
    if found:
        columns = ("task", "severity", "check", "finding")
        lines += [*markdown_table(columns, [(one.task, one.severity, one.check, about(one)) for one in found]), ""]
        advice = {one.check: CHECKS[one.check].advice for one in found}
        lines += [*markdown_table(("check", "what to do"), list(advice.items())), ""]
    numbers = ("reference", "empty", "tests", "build", "findings")
    return "\n".join((*lines, *markdown_table(("task", *numbers), map(_cells, checked), numbers), ""))


def _cells(one: Checked) -> tuple[str, ...]:
    passed = (f"{count} of {one.runs}" for count in (one.reference, one.empty))
    took = (f"{seconds:.1f} s" for seconds in (one.test_seconds, one.build_seconds))
    return (one.instance_id, *passed, *took, str(len(one.findings)))
