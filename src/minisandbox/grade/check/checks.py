"""Define the checks of a task: the evidence that each needs, how it finds faults, and how to fix a finding."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from minisandbox.errors import MiniSandboxError
from minisandbox.grade.leaks import telling_lines
from minisandbox.grade.report import MISSING
from minisandbox.grade.validation import Cause, Validation, not_seen_failing
from minisandbox.grade.verdict import Grade, Reason
from minisandbox.patches import touched_files
from minisandbox.spec import DockerfileBase, GitSource, OciBase, PythonRecipe, Remote, is_commit, parse_reference
from minisandbox.tasks import ContainerBuild, Form, LogGrader, ScriptGrader, Task, file_of


class Severity(enum.StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    """The task yields wrong rewards, or no reward."""
    WARNING = "warning"
    """The task works, but should be reviewed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault that a check found in a task.

    Attributes:
        what: the fault, in a sentence.
        where: the file, the field or the run at fault; "" if the name of the check says it.
        tests: the affected tests.
        severity: replaces the severity of the check, unless None.
    """

    what: str
    where: str = ""
    tests: tuple[str, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts that the checks examine. Checks of rows use only ``task`` and ``twin``.

    Attributes:
        task: the task.
        twin: a sentence about the earlier task that this task duplicates; "" if there is none.
        timeout: the time limit of one test run, in seconds.
        build_seconds: the build time of all layers of the task's image.
        failure: the error if the image could not be built or validated, else None.
        validation: the test runs and the leaks; None after a failure.
        reordered: a run of the reference with the test files in reverse order, or None if there was no such run.
        forged: files that an agent can write, and whose forged copies made the verifier pass the untouched code.
    """

    task: Task
    twin: str = ""
    timeout: float = 0.0
    build_seconds: float = 0.0
    failure: MiniSandboxError | None = None
    validation: Validation | None = None
    reordered: Grade | None = None
    forged: tuple[str, ...] = ()

    @property
    def results(self) -> Validation:
        """The test runs and the leaks, for checks that require a validation."""
        assert self.validation is not None
        return self.validation


_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE | re.MULTILINE)
_ENOUGH = 0.95


def empty_instruction(evidence: Evidence) -> Iterator[Problem]:
    """Report an empty instruction."""
    if not evidence.task.problem_statement.strip():
        yield Problem("the instruction is empty", "problem_statement")


def solution_in_instruction(evidence: Evidence) -> Iterator[Problem]:
    """Report an instruction that contains the lines of the reference."""
    line_groups = [group for group in telling_lines(evidence.task) if group.kind == "reference"]
    solution = {line.strip() for group in line_groups for line in group.lines}
    lines = evidence.task.problem_statement.splitlines()
    revealed = solution & {form for line in lines for form in (line.strip(), line[1:].strip())}
    if solution and len(revealed) >= _ENOUGH * len(solution):
        yield Problem(f"it has {len(revealed)} of {len(solution)} telling lines of the reference", "problem_statement")


def duplicate(evidence: Evidence) -> Iterator[Problem]:
    """Report a task that duplicates an earlier one."""
    if evidence.twin:
        yield Problem(evidence.twin)


def twins(tasks: Iterable[Task]) -> dict[str, str]:
    """Return a sentence for each task that duplicates an earlier one, by its id.

    Two tasks are duplicates if they have the same patch or the same instruction for the same code. In SWE-smith's form,
    only the patch counts, because each patch creates different code.
    """
    earlier_ids: dict[tuple[str, ...], str] = {}
    duplicates: dict[str, str] = {}
    for task in tasks:
        code = (task.repo, task.base_commit or repr(task.build), task.form)
        keys = {("patch", *code, task.patch.strip()): "patch"} if task.patch.strip() else {}
        if task.form is not Form.SWESMITH and (instruction := task.problem_statement.strip()):
            keys |= {("instruction", *code, instruction): "instruction"}
        for key, shared_part in keys.items():
            if (earlier_id := earlier_ids.setdefault(key, task.instance_id)) != task.instance_id:
                duplicates.setdefault(task.instance_id, f"{earlier_id} has the same {shared_part} for the same code")
    return duplicates


def unpinned(evidence: Evidence) -> Iterator[Problem]:
    """Report an image whose content may change, because an input has no pinned version."""
    match evidence.task.build:
        case ContainerBuild(base=OciBase(reference=reference)):
            if _is_floating(reference):
                yield Problem(f"{reference} names no digest", "build.image")
        case ContainerBuild(base=DockerfileBase(dockerfile=path)):
            content = path.read_text("utf-8", "replace") if path.is_file() else ""
            stages = {"scratch", *(name.lower() for _, name in _FROM.findall(content) if name)}
            for base in dict.fromkeys(base for base, _ in _FROM.findall(content)):
                if base.lower() not in stages and "@sha256:" not in base:
                    yield Problem(f"FROM {base} names no digest", path.name)
        case PythonRecipe() as build:
            yield from _unpinned_python(build)


def _is_floating(reference: str) -> bool:
    parsed = parse_reference(reference)
    return isinstance(parsed, Remote) and not parsed.digest


def _unpinned_python(build: PythonRecipe) -> Iterator[Problem]:
    if isinstance(build.source, GitSource) and not is_commit(build.source.commit):
        yield Problem(f"{build.source.commit!r} is not a whole commit id", "build.source")
    floating = [line for line in build.requirements if "==" not in line and " @ " not in line]
    if floating and not build.exclude_newer:
        yield Problem(f"{len(floating)} requirements have no version, such as {floating[0]!r}", "build.requirements")


def tests_in_patch(evidence: Evidence) -> Iterator[Problem]:
    """Report named tests in a file that the solution changes, because a submission may rewrite them."""
    task = evidence.task
    touched = set(touched_files(task.patch)) - set(touched_files(task.test_patch))
    tests = tuple(test for test in task.FAIL_TO_PASS + task.PASS_TO_PASS if file_of(test) in touched)
    if tests:
        files = ", ".join(sorted({file_of(test) for test in tests}))
        yield Problem(
            f"{len(tests)} named tests are in a file of the patch: a submission may rewrite them", files, tests
        )


def no_reference(evidence: Evidence) -> Iterator[Problem]:
    """Report a task without a known solution, because nothing shows that it can be solved."""
    if not evidence.task.patch.strip() and evidence.task.solution is None:
        yield Problem("it has no patch and no solution")


SLOW_BUILD = 1800.0  # seconds


def not_built(evidence: Evidence) -> Iterator[Problem]:
    """Report an image that cannot be built or pulled."""
    if evidence.failure is not None:
        yield Problem(f"{type(evidence.failure).__name__}: {evidence.failure}")


def slow_build(evidence: Evidence) -> Iterator[Problem]:
    """Report an image that takes more than half an hour to build."""
    if evidence.build_seconds > SLOW_BUILD:
        yield Problem(f"its layers took {evidence.build_seconds / 60:.0f} minutes to build")


def solution_in_image(evidence: Evidence) -> Iterator[Problem]:
    """Report a file in the image that contains the lines of the reference."""
    return _leaks(evidence, "reference")


def tests_in_image(evidence: Evidence) -> Iterator[Problem]:
    """Report a file in the image that contains the lines of hidden tests."""
    return _leaks(evidence, "tests")


def history_in_image(evidence: Evidence) -> Iterator[Problem]:
    """Report a repository in the image whose history goes beyond the task's commit or contains the solution."""
    return _leaks(evidence, "history")


def archive_in_image(evidence: Evidence) -> Iterator[Problem]:
    """Report an archive of the project in the image."""
    return _leaks(evidence, "archive")


def _leaks(evidence: Evidence, kind: str) -> Iterator[Problem]:
    for leak in evidence.results.leaks:
        if leak.kind == kind:
            yield Problem(leak.detail, leak.place)


NEAR = 0.5  # a share of the time limit: a loaded machine may need twice as long


def reference_fails(evidence: Evidence) -> Iterator[Problem]:
    """Report a known solution that does not pass."""
    validation = evidence.results
    if _are_uncertain(validation.reference):
        return
    run = validation.reference[0]
    if not run.judged:
        if run.reason is not Reason.TIMEOUT:
            yield Problem(f"{run.reason}: {run.detail}", _REFERENCE)
    elif isinstance(evidence.task.grader, ScriptGrader):
        if not run.resolved:
            yield Problem(run.detail, _REFERENCE)
    elif tests := _stable(validation, run.failed_fail_to_pass, excluding=_missing(validation)):
        yield Problem(f"{len(tests)} FAIL_TO_PASS tests do not pass", _REFERENCE, tests)


def reference_breaks_tests(evidence: Evidence) -> Iterator[Problem]:
    """Report PASS_TO_PASS tests that pass without a patch and fail with the known solution."""
    validation = evidence.results
    if _are_judged(validation.reference):
        excluded = _missing(validation)
        if _are_judged(validation.empty):
            excluded += validation.empty[0].failed_pass_to_pass
        if tests := _stable(validation, validation.reference[0].failed_pass_to_pass, excluding=excluded):
            yield Problem(f"{len(tests)} PASS_TO_PASS tests do not pass", _REFERENCE, tests)


def missing_test(evidence: Evidence) -> Iterator[Problem]:
    """Report tests in the lists that do not exist."""
    if tests := _missing(evidence.results):
        yield Problem(f"{len(tests)} named tests do not exist", _REFERENCE, tests)


def empty_resolves(evidence: Evidence) -> Iterator[Problem]:
    """Report untouched code that passes."""
    if all(run.resolved for run in evidence.results.empty):
        yield Problem("everything passes without any patch", _EMPTY)


def f2p_not_failing(evidence: Evidence) -> Iterator[Problem]:
    """Report FAIL_TO_PASS tests that do not fail without a patch."""
    validation = evidence.results
    if not evidence.task.FAIL_TO_PASS or _are_uncertain(validation.empty) or validation.empty[0].resolved:
        return
    run = validation.empty[0]
    if run.reason is Reason.TIMEOUT or not validation.reference[0].judged:
        return
    tests = _stable(validation, not_seen_failing(evidence.task, run), excluding=_missing(validation))
    if tests and not run.judged:
        yield Problem(f"no test was seen: {run.reason}: {run.detail}", _EMPTY, tests)
    elif tests:
        yield Problem(f"{len(tests)} FAIL_TO_PASS tests do not fail", _EMPTY, tests, _softer(evidence.task, validation))


def p2p_not_passing(evidence: Evidence) -> Iterator[Problem]:
    """Report PASS_TO_PASS tests that fail without a patch."""
    validation = evidence.results
    if not _are_judged(validation.empty):
        return
    if tests := _stable(validation, validation.empty[0].failed_pass_to_pass, excluding=_missing(validation)):
        yield Problem(f"{len(tests)} PASS_TO_PASS tests do not pass", _EMPTY, tests, _softer(evidence.task, validation))


def flaky(evidence: Evidence) -> Iterator[Problem]:
    """Report results that differ between runs of the same code."""
    validation = evidence.results
    if _ended(evidence, Reason.TIMEOUT):
        return
    if any(len({(run.resolved, run.score) for run in runs}) > 1 for runs in (validation.reference, validation.empty)):
        yield Problem("the same code resolves it in one run and not in another", tests=validation.flaky)
    elif validation.flaky:
        sentence = f"{len(validation.flaky)} tests change from run to run"
        yield Problem(sentence, tests=validation.flaky, severity=_softer(evidence.task, validation))


def order_dependent(evidence: Evidence) -> Iterator[Problem]:
    """Report a known solution that does not pass if the test files run in another order."""
    run = evidence.reordered
    if run is not None and run.resolved is False and evidence.results.reference[0].resolved:
        tests = run.failed_fail_to_pass + run.failed_pass_to_pass
        yield Problem(f"with the test files in reverse order: {run.detail}", _REFERENCE, tests)


def timeout(evidence: Evidence) -> Iterator[Problem]:
    """Report tests that reach their time limit."""
    for side, run in _ended(evidence, Reason.TIMEOUT).items():
        yield Problem(f"{run.detail} (limit {evidence.timeout:g} s)", side)


def near_timeout(evidence: Evidence) -> Iterator[Problem]:
    """Report tests that take more than half of their time limit."""
    validation = evidence.results
    if _ended(evidence, Reason.TIMEOUT):
        return
    runs = validation.empty
    # the reference runs of a script grader include the time that the solution takes
    if not isinstance(evidence.task.grader, ScriptGrader):
        runs += validation.reference
    longest = max(run.duration for run in runs)
    if longest > NEAR * evidence.timeout:
        yield Problem(f"the longest run took {longest:.0f} s of {evidence.timeout:g} s")


def no_reward(evidence: Evidence) -> Iterator[Problem]:
    """Report a verifier that writes no reward."""
    for side, run in list(_ended(evidence, Reason.NO_REWARD).items())[:1]:
        yield Problem(run.detail, side)


def misread_log(evidence: Evidence) -> Iterator[Problem]:
    """Report results that the benchmark's parser misreads in the log of the known solution."""
    for misreading in evidence.results.reference[0].misread:
        yield Problem(misreading.what, "test.parser", misreading.tests)


def not_confirmable(evidence: Evidence) -> Iterator[Problem]:
    """Report passes in the agent's sandbox that cannot be confirmed in a clean one."""
    if isinstance(evidence.task.grader, ScriptGrader):
        yield from map(Problem, evidence.results.notes)


def writable_verifier(evidence: Evidence) -> Iterator[Problem]:
    """Report a file that decides the reward and that an agent can replace."""
    for path in evidence.forged:
        yield Problem("an agent can write it, and with a forged copy the untouched code passes", path)


def infrastructure(evidence: Evidence) -> Iterator[Problem]:
    """Report that the check itself failed."""
    if evidence.failure is not None:
        yield Problem(f"{type(evidence.failure).__name__}: {evidence.failure}")
        return
    runs = evidence.results.reference + evidence.results.empty
    details = (run.detail for run in runs if run.resolved is None and run.reason is not Reason.NO_REWARD)
    yield from map(Problem, list(details)[:1])


_REFERENCE = "with the reference"
_EMPTY = "without a patch"


def _softer(task: Task, validation: Validation) -> Severity | None:
    """Return WARNING if the benchmark itself accepts its row as valid, else None for the severity of the check."""
    holds = validation.valid or validation.cause is Cause.LEAK
    return Severity.WARNING if holds and isinstance(task.grader, LogGrader) else None


def _are_judged(runs: Iterable[Grade]) -> bool:
    """Return whether all runs report the outcome of each test."""
    return all(run.judged for run in runs)


def _are_uncertain(runs: Sequence[Grade]) -> bool:
    """Return whether a run has no result, or the results differ and not every run reports its tests."""
    results = {run.resolved for run in runs}
    return None in results or (len(results) > 1 and not _are_judged(runs))


def _stable(validation: Validation, tests: Iterable[str], *, excluding: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the tests that are neither flaky nor in ``excluding``."""
    excluded = {*validation.flaky, *excluding}
    return tuple(test for test in tests if test not in excluded)


def _missing(validation: Validation) -> tuple[str, ...]:
    """Return the named tests that are missing from the reference's run, without flaky ones."""
    run = validation.reference[0]
    missing_tests = {test for test, outcome in run.outcomes if outcome == MISSING}
    failed = run.failed_fail_to_pass + run.failed_pass_to_pass if run.reason is Reason.TESTS_NOT_PASSED else ()
    return _stable(validation, (test for test in failed if test in missing_tests))


def _ended(evidence: Evidence, reason: Reason) -> dict[str, Grade]:
    """Return the first run that ended for this reason, for the reference and for the untouched code."""
    sides = {_REFERENCE: evidence.results.reference, _EMPTY: evidence.results.empty}
    return {side: run for side, runs in sides.items() for run in runs[::-1] if run.reason is reason}


_ERROR, _WARNING = Severity


@dataclass(frozen=True, slots=True)
class Check:
    """A check of tasks, with its severity and advice.

    Attributes:
        find: yields the faults; the name of the function is the name of the check.
        severity: the severity of its findings, unless a finding overrides it.
        advice: what to do about a finding.
    """

    find: Callable[[Evidence], Iterable[Problem]]
    severity: Severity
    advice: str

    @property
    def name(self) -> str:
        """The name of the check in reports."""
        return self.find.__name__


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a task, as reports list it.

    Attributes:
        task: the task's id; for a row that is no task, its position.
        check: the name of the check.
        severity: the severity.
        where: the file, the field or the run at fault; "" if the name of the check says it.
        what: the fault, in a sentence.
        tests: the affected tests.
    """

    task: str
    check: str
    severity: Severity
    where: str
    what: str
    tests: tuple[str, ...] = ()


def unusable_row(_: Evidence) -> Iterator[Problem]:
    """Report a row that is not a task."""
    yield from ()  # `check_set` creates these findings from the errors of the row reader


ROWS = (
    Check(unusable_row, _ERROR, "fix the field that the message names, or leave the row out"),
    Check(empty_instruction, _ERROR, "say what the agent has to do"),
    Check(solution_in_instruction, _ERROR, "take the reference's lines out of the instruction"),
    Check(no_reference, _ERROR, "add a patch or a solution, or leave the task out"),
    Check(duplicate, _WARNING, "leave one of them out: it counts twice"),
    Check(tests_in_patch, _WARNING, "move the tests to a file that only test_patch touches"),
    Check(unpinned, _WARNING, "pin it: NAME@sha256:..., a whole commit id, PACKAGE==VERSION"),
)  # fmt: skip
"""The checks that need only the row."""

RUNS = (
    Check(not_built, _ERROR, "fix the recipe; `image build --shell` opens the failed step"),
    Check(slow_build, _WARNING, "pin requirements in build.requirements, which tasks share"),
    Check(solution_in_image, _ERROR, "remove the file: build.remove, or the recipe"),
    Check(tests_in_image, _ERROR, "remove the file: build.remove, or the recipe"),
    Check(history_in_image, _ERROR, "cut the history (build.cut), or remove the other clone"),
    Check(archive_in_image, _ERROR, "remove the archive from the image"),
    Check(reference_fails, _ERROR, "correct the patch or the image; `validate -o` keeps the log"),
    Check(reference_breaks_tests, _ERROR, "correct the patch or PASS_TO_PASS"),
    Check(missing_test, _ERROR, "correct the tests' names, or take them out of the lists"),
    Check(empty_resolves, _ERROR, "name a test that fails without the patch"),
    Check(f2p_not_failing, _ERROR, "move the tests to PASS_TO_PASS, or correct them"),
    Check(p2p_not_passing, _ERROR, "take the tests out of PASS_TO_PASS"),
    Check(flaky, _ERROR, "take the tests out of the lists, or fix their clock, seed or port"),
    Check(order_dependent, _WARNING, "make the tests independent, or take them out of the lists"),
    Check(timeout, _ERROR, "raise test.timeout, or take the slow tests out of the lists"),
    Check(near_timeout, _WARNING, "raise test.timeout to four times what the tests take"),
    Check(no_reward, _ERROR, "let the verifier write a reward whatever happens, 0 first"),
    Check(misread_log, _WARNING, "change test.command or the tests' names; docs/reference/graders.md"),
    Check(not_confirmable, _WARNING, "let the work stay in the working directory or in artifacts"),
    Check(writable_verifier, _ERROR, "move the file to tests/, which the grader brings"),
    Check(infrastructure, _ERROR, "repeat the command; `minisandbox doctor` checks this machine"),
)  # fmt: skip
"""The checks that need an image and test runs."""

CHECKS: Mapping[str, Check] = {check.name: check for check in (*ROWS, *RUNS)}
"""All checks, by name, in the order of reports."""


def findings(evidence: Evidence, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Run checks on the evidence, and return their findings."""
    return tuple(
        Finding(evidence.task.instance_id, check.name, p.severity or check.severity, p.where, p.what, p.tests)
        for check in checks
        for p in check.find(evidence)
    )
