"""Grade: the verdict on one submission, why, and what it rests on."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from minisandbox.tasks.harness import Misreading


class Verdict(enum.StrEnum):
    """What grading says of a submission. ``unconfirmed`` and ``infra_error`` have no reward."""

    RESOLVED = "resolved"
    FAILED = "failed"
    """The tests ran or could have run, and the submission does not do what they ask."""
    TAMPERED = "tampered"
    """The submission changed how it was judged, or tried to."""
    PATCH_INVALID = "patch_invalid"
    TIMEOUT = "timeout"
    OOM = "oom"
    UNCONFIRMED = "unconfirmed"
    """Every named test passed, but a run that had to confirm it was not believed, twice: neither pass nor failure."""
    INFRA_ERROR = "infra_error"
    """Our own failure: never a statement about the submission, never a reward of 0."""


class Reason(enum.StrEnum):
    """Why a verdict is what it is. docs/design/grading.md has the table."""

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
        """Read the reasons of older records."""
        return cls.CHANGED_TEST_PASSED if value in _FORMER else None

    @property
    def verdict(self) -> Verdict:
        """The verdict that goes with it; most reasons are ways to fail."""
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
"""The kind of a flag: no further run confirmed the pass."""
REPEATED = "repeated"
"""The kind of a flag: a run of ours was repeated, because its first fate may have been an accident."""
APPLIED_WITH_FUZZ = "applied_with_fuzz"
"""The kind of a flag: the patch is damaged; its detail is the official harness's command that applied it."""
_ABOUT_GRADING = frozenset({NOT_CONFIRMED, REPEATED, APPLIED_WITH_FUZZ})


@dataclass(frozen=True, slots=True)
class Flag:
    """Something about a submission that people should see; by itself it decides nothing.

    Attributes:
        kind: what it is, e.g. ``pytest_config``.
        path: the file of the submission.
        detail: what in it, where a word does not say it: a line of code.
    """

    kind: str
    path: str
    detail: str = ""

    @property
    def is_suspicious(self) -> bool:
        """Whether it is about the submission, and not about how it was graded."""
        return self.kind not in _ABOUT_GRADING


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one submission.

    Attributes:
        instance_id: the task's id.
        verdict: resolved, failed, tampered, patch_invalid, timeout, oom, unconfirmed or infra_error.
        reason: why, as a word that programs can compare.
        detail: why, in a sentence.
        outcomes: each named test with its outcome (``missing`` where none was reported, ``uncollected`` where its file
            was seen not to be collected), FAIL_TO_PASS first.
        failed_fail_to_pass: the FAIL_TO_PASS tests that did not pass.
        failed_pass_to_pass: the PASS_TO_PASS tests that did not pass.
        flags: files of the submission that were not applied because they are protected, and code in it that people
            should look at.
        exit_code: the test runner's exit status, or None where it had none.
        duration: seconds that grading took.
        log: the end of the runner's output, for people; nothing is read from it.
        score: the reward that a script gave; None where tests decide.
        misread: what the benchmark's parser misreads of the log of the reference.
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
        """Whether the submission resolves the task; None where the verdict is unconfirmed or infra_error."""
        return None if self.verdict in _WITHOUT_REWARD else self.verdict is Verdict.RESOLVED

    @property
    def judged(self) -> bool:
        """Whether the run was believed, and so says what became of each test."""
        return self.reason in (Reason.RESOLVED, Reason.TESTS_NOT_PASSED)

    @property
    def reward(self) -> float | None:
        """1.0 or 0.0, or a script's score; None where the verdict is unconfirmed or infra_error."""
        if self.resolved is None:
            return None
        return float(self.resolved) if self.score is None else self.score
