"""Checking task sets: what a careful maintainer asks of every task before anybody trains on it."""

from minisandbox.grade.check.evidence import Severity
from minisandbox.grade.check.report import check_report, check_table, write_check_reports
from minisandbox.grade.check.sets import Checked, check_set
from minisandbox.grade.check.table import CHECKS, Check, Finding

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
