"""Check task sets for faults that would make rewards wrong, before anyone trains on the tasks."""

from minisandbox.grade.check.checks import CHECKS, Check, Finding, Severity
from minisandbox.grade.check.sets import Checked, check_report, check_set, check_table, write_check_reports

__all__ = [
    "CHECKS",
    "Check",
    "Checked",
    "Finding",
    "Severity",
    "check_report",
    "check_set",
    "check_table",
    "write_check_reports",
]
