"""The reports of a check: for programs, and for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from minisandbox.grade.check.evidence import Severity
from minisandbox.grade.check.sets import Checked
from minisandbox.grade.check.table import CHECKS, Finding
from minisandbox.store.rundir import write_whole

_ORDER = list(Severity), list(CHECKS)


def write_check_reports(out: Path, checked: Sequence[Checked]) -> None:
    """Write ``report.json`` and ``report.md``.

    Args:
        out: the run directory.
        checked: what is known of the tasks.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_whole(out / "report.json", json.dumps(check_report(checked), indent=1).encode() + b"\n")
    write_whole(out / "report.md", check_table(checked).encode("utf-8", "backslashreplace"))


def all_findings(checked: Sequence[Checked]) -> list[Finding]:
    """Return the findings of all tasks: errors first, then by check, then in the order of the tasks."""
    found = [finding for one in checked for finding in one.findings]
    return sorted(found, key=lambda one: (_ORDER[0].index(one.severity), _ORDER[1].index(one.check)))


def check_report(checked: Sequence[Checked]) -> dict[str, object]:
    """Return the report for programs; what differs from run to run is under ``measured`` alone.

    Args:
        checked: what is known of the tasks.
    """
    found = all_findings(checked)
    return {
        "format": "minisandbox-check-report",
        "version": 1,
        "tasks": len(checked),
        "ran": sum(one.ran for one in checked),
        "counts": {severity.value: sum(one.severity is severity for one in found) for severity in Severity},
        "checks": dict(Counter(one.check for one in found)),
        "findings": [
            {
                "task": one.task,
                "severity": one.severity.value,
                "check": one.check,
                "where": one.where,
                "what": one.what,
                "tests": list(one.tests),
                "advice": CHECKS[one.check].advice,
            }
            for one in found
        ],
        "results": [
            {
                "instance_id": one.instance_id,
                "ran": one.ran,
                "reference": list(one.reference),
                "empty": list(one.empty),
                "findings": [finding.check for finding in one.findings],
                "measured": {name: getattr(one, name) for name in ("build_seconds", "test_seconds", "seconds")},
            }
            for one in checked
        ],
    }


def summary(checked: Sequence[Checked]) -> str:
    """Return what was found in all, in one line."""
    counts = Counter(one.severity for one in all_findings(checked))
    bad = sum(bool(one.findings) for one in checked)
    ran = sum(one.ran for one in checked)
    how = "" if ran == len(checked) else f" ({ran} with their images and tests, the others by their rows alone)"
    found = " and ".join(f"{counts[one]} {one}s" for one in Severity) + f" in {bad} tasks" if bad else "no findings"
    return f"{len(checked)} tasks checked{how}: {found}"


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
        lines += ["| task | severity | check | finding |", "|---|---|---|---|"]
        lines += [_row(one.task, one.severity, one.check, about(one)) for one in found]
        lines += ["", "| check | what it finds | what to do |", "|---|---|---|"]
        lines += [
            _row(name, (check.find.__doc__ or "").rstrip("."), check.advice)
            for name, check in CHECKS.items()
            if any(one.check == name for one in found)
        ]
        lines.append("")
    lines += ["| task | reference | without a patch | tests | build | findings |", "|---|--:|--:|--:|--:|--:|"]
    for one in checked:
        runs = [f"{passed} of {all_}" if all_ else "-" for passed, all_ in (one.reference, one.empty)]
        seconds = [f"{took:.1f} s" for took in (one.test_seconds, one.build_seconds)]
        lines.append(_row(one.instance_id, *runs, *seconds, str(len(one.findings))))
    return "\n".join((*lines, ""))


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split())[:500] for cell in cells) + " |"
