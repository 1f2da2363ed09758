"""Grading: hidden tests in a fresh sandbox, per-test outcomes, and what of them is believed."""

from minisandbox.grade.grading import grade, grade_reference, grade_untouched
from minisandbox.grade.measurement import Measurement, derive_test_lists, measure
from minisandbox.grade.policy import Policy
from minisandbox.grade.resumable import Progress
from minisandbox.grade.submission import MAX_SUBMISSION
from minisandbox.grade.validation import Cause, Status, Validation, validate
from minisandbox.grade.validation_report import validation_report, validation_table, write_validation_reports
from minisandbox.grade.validations import Validated, run_validations
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict

__all__ = [
    "MAX_SUBMISSION",
    "Cause",
    "Flag",
    "Grade",
    "Measurement",
    "Policy",
    "Progress",
    "Reason",
    "Status",
    "Validated",
    "Validation",
    "Verdict",
    "derive_test_lists",
    "grade",
    "grade_reference",
    "grade_untouched",
    "measure",
    "run_validations",
    "validate",
    "validation_report",
    "validation_table",
    "write_validation_reports",
]
