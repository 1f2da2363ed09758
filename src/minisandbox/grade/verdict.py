"""The verdict on a submission, with its reason and evidence."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from minisandbox.tasks.harness import Misreading


class Verdict(enum.StrEnum):
    """The verdict on a submission; ``unconfirmed`` and ``infra_error`` have no reward."""

    RESOLVED = "resolved"
    FAILED = "failed"
    """The tests ran or could have run, and the submission does not pass them."""
    TAMPERED = "tampered"
    """The submission changed how it was graded, or tried to."""
    PATCH_INVALID = "patch_invalid"
    TIMEOUT = "timeout"
    OOM = "oom"
    UNCONFIRMED = "unconfirmed"
    """Every named test passed, but the confirming runs were not believed, or disagreed."""
    INFRA_ERROR = "infra_error"
    """The infrastructure failed; this says nothing about the submission, and is never a reward of 0."""


class Reason(enum.StrEnum):
    """The reason of a verdict; docs/design/grading.md explains each."""

    RESOLVED = "resolved"
    UNCONFIRMED = "unconfirmed"
    TESTS_NOT_PASSED = "tests_not_passed"
    NOT_REPEATED = "not_repeated"
    NOTHING_TO_TEST = "nothing_to_test"

    PATCH_INVALID = "patch_invalid"
    PATCH_STEP_FAILED = "patch_step_failed"
    RESTORE_FAILED = "restore_failed"

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    NOT_STARTED = "runner_not_started"
    NO_END = "ended_early"
    EXIT_MISMATCH = "exit_status_mismatch"
    INTERRUPTED = "runner_interrupted"
    INTERNAL_ERROR = "runner_internal_error"
    USAGE_ERROR = "runner_usage_error"
    NO_TESTS = "no_tests_collected"
    SANDBOX_DIED = "sandbox_died"

    REPORT_DAMAGED = "report_damaged"
    EXIT_FORGED = "exit_status_forged"
    LOG_MISMATCH = "log_mismatch"
    LOG_UNREADABLE = "log_unreadable"
    NO_RESULTS = "no_results"
    COLLECTION_CHANGED = "collection_changed"
    CHANGED_TEST_PASSED = "changed_test_passed"
    TESTS_CHANGED = "tests_changed"

    NO_REWARD = "no_reward"
    INFRASTRUCTURE = "infrastructure"
    REFERENCE_UNTRUSTED = "reference_untrusted"

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        """Convert the reasons in older records."""
        return cls.CHANGED_TEST_PASSED if value in _FORMER else None

    @property
    def verdict(self) -> Verdict:
        """The verdict that follows from this reason; ``failed`` for most."""
        return _VERDICTS.get(self, Verdict.FAILED)


_FORMER = frozenset({"runner_changed", "sentinel_wrong", "equality_forged"})
_WITHOUT_REWARD = frozenset({Verdict.UNCONFIRMED, Verdict.INFRA_ERROR})
_VERDICTS = {
    Reason.RESOLVED: Verdict.RESOLVED,
    Reason.UNCONFIRMED: Verdict.UNCONFIRMED,
    Reason.PATCH_INVALID: Verdict.PATCH_INVALID,
    Reason.TIMEOUT: Verdict.TIMEOUT,
    Reason.OUT_OF_MEMORY: Verdict.OOM,
    Reason.REPORT_DAMAGED: Verdict.TAMPERED,
    Reason.EXIT_FORGED: Verdict.TAMPERED,
    Reason.LOG_MISMATCH: Verdict.TAMPERED,
    Reason.COLLECTION_CHANGED: Verdict.TAMPERED,
    Reason.CHANGED_TEST_PASSED: Verdict.TAMPERED,
    Reason.TESTS_CHANGED: Verdict.TAMPERED,
    Reason.NO_REWARD: Verdict.INFRA_ERROR,
    Reason.INFRASTRUCTURE: Verdict.INFRA_ERROR,
    Reason.REFERENCE_UNTRUSTED: Verdict.INFRA_ERROR,
}


NOT_CONFIRMED = "not_confirmed"
"""Flag kind: no further run confirmed the pass."""
REPEATED = "repeated"
"""Flag kind: a run of the reference or of the untouched code was repeated after a possible accident."""
APPLIED_WITH_FUZZ = "applied_with_fuzz"
"""Flag kind: the patch is damaged; the detail is the official harness's command that applied it."""
_ABOUT_GRADING = frozenset({NOT_CONFIRMED, REPEATED, APPLIED_WITH_FUZZ})


@dataclass(frozen=True, slots=True)
class Flag:
    """A remark on a submission for reviewers; it does not change the verdict.

    Attributes:
        kind: the kind, e.g. ``pytest_config``.
        path: the file of the submission.
        detail: further details, e.g. a line of code.
    """

    kind: str
    path: str
    detail: str = ""

    @property
    def is_suspicious(self) -> bool:
        """Whether the flag concerns the submission, not its grading."""
        return self.kind not in _ABOUT_GRADING


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one submission.

    Attributes:
        instance_id: the task's id.
        verdict: resolved, failed, tampered, patch_invalid, timeout, oom, unconfirmed or infra_error.
        reason: the reason of the verdict.
        detail: the reason in a sentence.
        outcomes: each named test with its outcome, FAIL_TO_PASS first; ``missing`` if it was not reported,
            ``uncollected`` if its file could not be collected.
        failed_fail_to_pass: the FAIL_TO_PASS tests that did not pass.
        failed_pass_to_pass: the PASS_TO_PASS tests that did not pass.
        flags: protected files of the submission, which were not applied, and suspicious code.
        exit_code: the test runner's exit status, or None if it was killed.
        duration: the duration of the grading in seconds.
        log: the end of the runner's output, for display only.
        score: a script's reward; None if tests decide.
        misread: the misreadings of the benchmark's parser in the log of the reference.
    """

    instance_id: str
    verdict: Verdict
    reason: Reason
    detail: str = ""
    outcomes: tuple[tuple[str, str], ...] = ()
    failed_fail_to_pass: tuple[str, ...] = ()
    failed_pass_to_pass: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    exit_code: int | None = None
    duration: float = 0.0
    log: str = ""
    score: float | None = None
    misread: tuple[Misreading, ...] = ()

    @property
    def resolved(self) -> bool | None:
        """Whether the submission resolves the task; None if the verdict is unconfirmed or infra_error."""
        return None if self.verdict in _WITHOUT_REWARD else self.verdict is Verdict.RESOLVED

    @property
    def judged(self) -> bool:
        """Whether the run was believed, so that its outcomes are valid."""
        return self.reason in (Reason.RESOLVED, Reason.TESTS_NOT_PASSED)

    @property
    def reward(self) -> float | None:
        """1.0, 0.0, or a script's score; None if the verdict is unconfirmed or infra_error."""
        if self.resolved is None:
            return None
        return float(self.resolved) if self.score is None else self.score
