"""Confirm a pass by a further test run, in which a forged pass fails.

In that run, unchanged tests must pass, and tests with a changed expectation must fail where the reference fails them
(:mod:`.variants`). A submission that recognises the run gains nothing unless it knows which tests are changed. A run
that is not believed (timeout, out of memory, dead sandbox) is repeated once. If the second run is not believed either,
the pass is ``unconfirmed``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minisandbox.errors import SandboxGone
from minisandbox.grade.confirm.changeable import changeable_tests, function_names, names_of, test_files
from minisandbox.grade.confirm.collection import mismatches
from minisandbox.grade.confirm.draws import VersionDraw, draws, draws_without_copies
from minisandbox.grade.confirm.editions import Edition, Readout, Version, make_edition
from minisandbox.grade.judging import Doubt, SuiteRun
from minisandbox.grade.report import FAILING, PASSED
from minisandbox.grade.submission import CodePatch, reference_change
from minisandbox.grade.verdict import NOT_CONFIRMED, Flag, Grade, Reason, Verdict
from minisandbox.grade.workspace import Workspace

ACCIDENTS = frozenset(
    {
        Reason.TIMEOUT, Reason.OUT_OF_MEMORY, Reason.KILLED, Reason.SANDBOX_DIED, Reason.PATCH_STEP_FAILED,
        Reason.RESTORE_FAILED, Reason.LOG_UNREADABLE,
    }
)  # fmt: skip
"""Doubts that the machine may have caused; they count against a submission only twice in a row."""
_NO_EDITION = Edition({}, ())


class _TamperedError(Exception):
    """The pass was forged."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _UnconfirmedError(Exception):
    """The pass could be neither confirmed nor refuted."""

    @classmethod
    def by_doubt(cls, title: str, doubt: Doubt) -> _UnconfirmedError:
        return cls(f"every named test passed, but {title} is not believed: {doubt.reason}: {doubt.detail}")


@dataclass(frozen=True, slots=True)
class _Finding:
    """A test that does not have the required outcome.

    Attributes:
        version: the version of the test.
        item: the parameters of the test.
        kind: ``spared``: a changed test passed; ``elsewhere``: a changed test neither passed nor failed at the required
            position; ``lost``: an unchanged test did not pass.
    """

    version: Version
    item: str
    kind: str

    def __str__(self) -> str:
        return self.version.test + (self.item if self.item.startswith("[") else "")


class Confirmation:
    """Confirm one pass of a submission.

    Args:
        workspace: the workspace in which the tests run.
        change: the applied part of the submission.
        thorough: whether to run all tests, not only FAIL_TO_PASS.
        times: the number of confirmations; each draws new changes.
    """

    def __init__(self, workspace: Workspace, change: CodePatch, *, thorough: bool = False, times: int = 1) -> None:
        self._workspace = workspace
        self._change = change
        self._thorough = thorough
        self._times = times
        self._names = function_names(workspace.task)
        self._files = test_files(workspace)
        self._rng = random.SystemRandom()

    def check_collection(self, run: SuiteRun, grade: Grade) -> Grade:
        """Compare the tests that a run collected with their source files.

        Args:
            run: the run in which every named test passed.
            grade: its grade.

        Returns:
            The grade; ``tampered`` if tests differ from their files that do not differ in the reference's run.

        Raises:
            MiniSandboxError: a sandbox could not be created.
            CancelledError: the grading was cancelled.
        """
        differences = mismatches(self._files, run.report.parameters)
        if not differences:
            return grade
        try:
            expected_differences = mismatches(
                self._files, self._control("the reference's run", _NO_EDITION, ()).report.parameters
            )
        except _UnconfirmedError as error:
            return _unconfirmed(grade, error)
        unexpected = [difference for difference in differences if difference not in expected_differences]
        detail = f"collected tests differ from their files: {_some(unexpected)}"
        return _tampered(grade, _TamperedError(Reason.COLLECTION_CHANGED, detail)) if unexpected else grade

    def confirm(self, run: SuiteRun, grade: Grade) -> Grade:
        """Run the tests once more, some of them with changed expectations.

        Args:
            run: the run in which every named test passed.
            grade: its grade.

        Returns:
            The grade, possibly with a flag; or a grade with the verdict tampered, failed or unconfirmed.

        Raises:
            MiniSandboxError: a sandbox could not be created.
            CancelledError: the grading was cancelled.
        """
        tests = changeable_tests(self._workspace)
        if tests.doubt:
            return _unconfirmed(grade, f"the reference's run on changed tests is not believed: {tests.doubt}")
        if not any(function.variants for function in tests.functions):
            flag = Flag(NOT_CONFIRMED, "", "no FAIL_TO_PASS test states an expectation that can be changed")
            return replace(grade, flags=(*grade.flags, flag))
        try:
            for draw in (draw for _ in range(self._times) for draw in draws(tests, run.duration, self._rng)):
                lost_tests = self._try(draw)
                if any(finding.version.test != finding.version.original for finding in lost_tests):
                    # a test and its copy share a process, so state that a correct solution keeps may break the copy
                    lost_tests = next(filter(None, map(self._try, draws_without_copies(tests, self._rng))), [])
                if lost_tests:
                    detail = f"tests that passed once failed in further runs: {_some(lost_tests)}"
                    return replace(grade, verdict=Verdict.FAILED, reason=Reason.NOT_REPEATED, detail=detail)
        except _TamperedError as error:
            return _tampered(grade, error)
        except _UnconfirmedError as error:
            return _unconfirmed(grade, error)
        return grade

    def _try(self, draw: VersionDraw) -> list[_Finding]:
        """Run one draw; return the unchanged tests that failed although the reference passes them.

        If a test does not have the required outcome, two further runs must be faultless. Otherwise a submission that
        guesses, or that behaves differently in every run, would profit from repetitions.

        Raises:
            _TamperedError: changed tests that the reference fails passed in two runs.
            _UnconfirmedError: two runs disagree, or two runs in a row were not believed.
        """
        edition = make_edition(self._files, draw.versions, self._rng, draw.definitions)
        test_names = () if self._thorough else self._chosen(edition)
        title = "the run with changed tests"
        findings = self._findings(draw, edition, self._run(title, edition, test_names))
        if not findings:
            return []
        retries = (self._findings(draw, edition, self._run(title, edition, test_names)) for _ in range(2))
        if not (retry_findings := next(filter(None, retries), [])):
            return []
        control_findings = self._findings(draw, edition, self._control(title, edition, test_names))
        runs = [[item for item in run if item not in control_findings] for run in (findings, retry_findings)]
        spared, lost = ([[item for item in run if item.kind == kind] for run in runs] for kind in ("spared", "lost"))
        if all(spared):
            raise _TamperedError(Reason.CHANGED_TEST_PASSED, f"tests that had to fail passed: {_some(spared[-1])}")
        if all(lost):
            return lost[-1]
        if runs[-1]:
            raise _UnconfirmedError(f"tests did not do what they had to in two of three runs: {_some(runs[-1])}")
        return []

    def _chosen(self, edition: Edition) -> tuple[str, ...]:
        return names_of(edition, self._workspace.task, self._names)

    def _findings(self, draw: VersionDraw, edition: Edition, run: SuiteRun | None) -> list[_Finding]:
        """Return the tests that do not have the required outcome; empty without a run."""
        if run is None:
            return []
        readout, findings = Readout(run, {**self._files, **edition.files}), []
        for version, name in zip(edition.versions, self._chosen(edition), strict=True):
            results = readout.items(name, version.test)
            if not version.is_changed:
                passing = draw.passing[version.original]
                findings += [
                    _Finding(version, item, "lost")
                    for item in passing
                    if item not in results or results[item].outcome != PASSED
                ]
                continue
            for item, positions in draw.failing[version.original, version.changes].items():
                result = results.get(item)
                if result is not None and result.outcome == PASSED:
                    findings.append(_Finding(version, item, "spared"))
                elif result is None or result.outcome not in FAILING or not {"", result.place} & positions:
                    findings.append(_Finding(version, item, "elsewhere"))
        return findings

    def _run(self, title: str, edition: Edition, test_names: Sequence[str]) -> SuiteRun | None:
        """Run the submission on edited test files.

        Returns:
            A run that is believed, or None if the reference's run on the same files is not believed either.

        Raises:
            _TamperedError: the run shows a forgery that the reference's run does not show.
            _UnconfirmedError: two runs in a row were not believed.
        """
        run = self._twice(self._change, edition, test_names)
        if run.doubt is None:
            return run
        doubt = run.doubt
        if doubt.reason in ACCIDENTS:
            raise _UnconfirmedError.by_doubt(title, doubt)
        if doubt.reason is not Reason.REPORT_DAMAGED:  # no control run: only a submission can damage its report
            control = self._twice(reference_change(self._workspace.task), edition, test_names)
            if control.doubt is not None and control.doubt.reason not in ACCIDENTS:
                return None
            if control.doubt is not None:
                raise _UnconfirmedError.by_doubt(f"{title}, made with the reference,", control.doubt)
        if doubt.reason.verdict is Verdict.TAMPERED:
            raise _TamperedError(doubt.reason, f"{title}: {doubt.detail}")
        raise _UnconfirmedError.by_doubt(title, doubt)

    def _control(self, title: str, edition: Edition, test_names: Sequence[str]) -> SuiteRun:
        """Run the reference on edited test files.

        Raises:
            _UnconfirmedError: two runs in a row were not believed.
        """
        run = self._twice(reference_change(self._workspace.task), edition, test_names)
        if run.doubt is not None:
            raise _UnconfirmedError.by_doubt(f"{title}, made with the reference,", run.doubt)
        return run

    def _twice(self, change: CodePatch, edition: Edition, test_names: Sequence[str]) -> SuiteRun:
        """Run the tests, and repeat a run that is not believed; after a timeout, triple the time limit."""
        run = _run_once(self._workspace, change, edition.files, test_names)
        if run.doubt is None or run.doubt.reason.verdict is Verdict.TAMPERED:
            return run
        workspace = self._workspace.patient() if run.doubt.reason is Reason.TIMEOUT else self._workspace
        return _run_once(workspace.reseeded(), change, edition.files, test_names)


def _run_once(
    workspace: Workspace, change: CodePatch, edited_files: Mapping[str, bytes], test_names: Sequence[str]
) -> SuiteRun:
    try:
        return workspace.run(change, edited_files, test_names)
    except SandboxGone as error:
        return SuiteRun.not_run(Doubt(Reason.SANDBOX_DIED, str(error)))


def _tampered(grade: Grade, error: _TamperedError) -> Grade:
    return replace(grade, verdict=error.reason.verdict, reason=error.reason, detail=str(error))


def _unconfirmed(grade: Grade, error: object) -> Grade:
    return replace(grade, verdict=Verdict.UNCONFIRMED, reason=Reason.UNCONFIRMED, detail=str(error))


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
