"""Grade submissions: run hidden tests in a fresh sandbox, and decide which outcomes to believe."""

from minisandbox.grade.confirm.variants import Kind
from minisandbox.grade.graders.script import LIVE, REGRADED, grade_work
from minisandbox.grade.grading import grade, grade_reference, grade_untouched
from minisandbox.grade.measurement import Measurement, derive_test_lists, measure
from minisandbox.grade.options import ALWAYS, ONCE, GradingOptions, confirmed_share
from minisandbox.grade.policy import Policy
from minisandbox.grade.sets.evaluations import (
    Evaluated,
    Evaluation,
    evaluation_report,
    harness_report,
    repository_scores,
    run_evaluation,
    write_evaluation_reports,
)
from minisandbox.grade.sets.predictions import (
    EMPTY,
    GOLD,
    Prediction,
    empty_predictions,
    read_predictions,
    reference_predictions,
)
from minisandbox.grade.sets.validations import (
    Validated,
    changeable_counts,
    run_validations,
    validation_report,
    validation_table,
    write_validation_reports,
)
from minisandbox.grade.startup import run_entrypoint, start_up
from minisandbox.grade.submission import MAX_SUBMISSION
from minisandbox.grade.validation import Cause, Status, Validation, validate
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.runs import DATABASE, Progress

__all__ = [
    "ALWAYS",
    "DATABASE",
    "EMPTY",
    "GOLD",
    "LIVE",
    "MAX_SUBMISSION",
    "ONCE",
    "REGRADED",
    "Cause",
    "Evaluated",
    "Evaluation",
    "Flag",
    "Grade",
    "GradingOptions",
    "Kind",
    "Measurement",
    "Policy",
    "Prediction",
    "Progress",
    "Reason",
    "Status",
    "Validated",
    "Validation",
    "Verdict",
    "changeable_counts",
    "confirmed_share",
    "derive_test_lists",
    "empty_predictions",
    "evaluation_report",
    "grade",
    "grade_reference",
    "grade_untouched",
    "grade_work",
    "harness_report",
    "measure",
    "read_predictions",
    "reference_predictions",
    "repository_scores",
    "run_entrypoint",
    "run_evaluation",
    "run_validations",
    "start_up",
    "validate",
    "validation_report",
    "validation_table",
    "write_evaluation_reports",
    "write_validation_reports",
]
