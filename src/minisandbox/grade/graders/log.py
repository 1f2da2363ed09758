"""Grade the output of a test command with a benchmark's own parser and rules.

The parser and the rules decide the result; this module decides whether to believe it. A reporter observes Python's
test runners from inside. Its results are written as a second log, from which the same parser and rules must reach the
same result. Runners of other languages have no reporter: their log is believed if the benchmark accepts it as the log
of a test run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from minisandbox.errors import HarnessError
from minisandbox.grade.judging import NOT_FOUND, Doubt, SuiteRun, doubt_about, log_of
from minisandbox.grade.report import Report
from minisandbox.grade.reporter import REPORT_VARIABLE, Reporter, RunnerKind, run_reported
from minisandbox.grade.verdict import Reason
from minisandbox.patches import touched_files
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import LogGrader, Task, file_of, harness, node_id
from minisandbox.tasks.harness import Misreading
from minisandbox.types import ExecResult, Outcome
from minisandbox.values import MiB

LOG_LIMIT = 128 * MiB
"""The maximum bytes kept of a test command's output: half from its start, half from its end."""

_LAST_SIGNAL = 128 + 64
"""A shell reports a signal as 128 + its number; 255 is the exit status of PHP and Perl after a fatal error."""
_SUMMARY = ("skipped", "passed", "xfailed", "xpassed", "error")
_UNKNOWN_RUNNER = "none of the runners that the reporter knows has run: unittest's, Django's and SymPy's"
_WORDS = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED", "xfailed": "XFAIL"}


class LogRunner:
    """One run of a benchmark's own test command.

    Args:
        task: the task.
        timeout: the time limit of the run, in seconds.
        hash_seed: the seed of Python's string hashes.
    """

    def __init__(self, task: Task, timeout: float, hash_seed: int = 0) -> None:
        assert isinstance(task.grader, LogGrader)
        self._task, self._grader = task, task.grader
        self._timeout = timeout
        self._hash_seed = hash_seed
        self._named = task.FAIL_TO_PASS + task.PASS_TO_PASS
        self._existing_files: frozenset[str] = frozenset()
        self._program = _program(task.grader)
        self._reporter = Reporter.make(RunnerKind.OTHER if self._program else RunnerKind.PYTEST)

    def install(self, box: Sandbox) -> None:
        """Install the reporter, and inspect the sandbox before the submission is applied.

        Raises:
            NotFound: there is no such parser.
            MissingExtra: the parser's package is not installed.
            HarnessError: the parser's package cannot be installed.
            FileAccessError: the reporter cannot be written.
            SandboxGone: the sandbox has ended.
        """
        harness.check_parser(self._grader.parser)
        if self._grader.reporter != "none":
            self._reporter.install(box)
            self._existing_files = _existing(box, {file_of(test) for test in self._named})

    def run(self, box: Sandbox, test_names: Sequence[str] = ()) -> SuiteRun:
        """Run the tests.

        Args:
            box: the sandbox.
            test_names: the tests to run, by the reporter's names; empty for all.

        Returns:
            The results of the tests; code under test cannot make this function raise.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        without_reporter = self._grader.reporter == "none"
        result, report = self._run_alone(box) if without_reporter else self._run_watched(box, test_names)
        run = SuiteRun(report, None, result.exit_code, result.duration, log_of(result))
        doubt = _command_doubt(result) if without_reporter else doubt_about(result, report) or _log_doubt(result)
        unwatched = self._program and doubt is not None and doubt.reason is Reason.NOT_STARTED
        if unwatched and result.exit_code not in NOT_FOUND:
            doubt = Doubt(Reason.NOT_STARTED, f"{_UNKNOWN_RUNNER} (exit status {result.exit_code})")
        if doubt is not None and doubt.reason not in _STILL_JUDGED:
            return replace(run, doubt=doubt)
        run = replace(run, doubt=doubt, whole_log=result.stderr)
        try:
            return self._judged_alone(run) if without_reporter else self._judged(run)
        except HarnessError as error:  # the control run shows whether the submission is at fault
            return replace(run, doubt=Doubt(Reason.LOG_UNREADABLE, str(error)))

    def _run_watched(self, box: Sandbox, test_names: Sequence[str]) -> tuple[ExecResult, Report]:
        variables = {**self._reporter.environment(box), "PYTHONHASHSEED": str(self._hash_seed)}
        by_tox = re.match(r"tox\b", self._grader.command) is not None
        if by_tox:  # tox passes on only configured variables; this adds some (tox 4: "Configuration override")
            variables["TOX_OVERRIDE"] = f"testenv.pass_env+={','.join((REPORT_VARIABLE, *variables))}"
        return run_reported(
            box,
            self._grader.command,
            () if self._program else ("-p", self._reporter.module),
            timeout=self._timeout,
            env=variables,
            test_names=test_names,
            folder=self._reporter.directory if by_tox else "",
            program=self._program,
        )

    def _run_alone(self, box: Sandbox) -> tuple[ExecResult, Report]:
        script = f"exec </dev/null >&2\n{self._grader.command}"  # one stream for all output preserves its order
        return box.exec(["bash", "-c", script], timeout=self._timeout), Report()

    def _judged_alone(self, run: SuiteRun) -> SuiteRun:
        judgement = self._judge(run.whole_log, self._task.FAIL_TO_PASS, self._task.PASS_TO_PASS, run.exit_code)
        run = replace(run, judgement=judgement)
        if judgement.found:
            return run
        detail = f"the log shows no test result, or none that fits the exit status ({run.exit_code})"
        return replace(run, doubt=Doubt(Reason.NO_RESULTS, detail))

    def _judge(
        self, log: str, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], exit_code: int | None = None
    ) -> harness.Judgement:
        return harness.judge(
            self._grader.parser,
            log,
            fail_to_pass,
            pass_to_pass,
            rule=self._grader.rule,
            about=about(self._task),
            exit_code=exit_code,
        )

    def _judged(self, run: SuiteRun) -> SuiteRun:
        task = self._task
        judgement = self._judge(run.whole_log, task.FAIL_TO_PASS, task.PASS_TO_PASS)
        run = replace(run, judgement=judgement)
        if not judgement.resolved:
            return run
        reported = self._reported()
        lists = [[test for test in tests if test in reported] for tests in (task.FAIL_TO_PASS, task.PASS_TO_PASS)]
        for log in _logs(run.report, printed=bool(self._program)):
            reported_judgement = self._judge(log, list(map(node_id, lists[0])), list(map(node_id, lists[1])))
            if reported_judgement.resolved:
                return run
        missing = (*reported_judgement.failed_fail_to_pass, *reported_judgement.failed_pass_to_pass)
        detail = (
            f"the log says that {missing[0]} passed, and the runner's own report does not ({len(missing)} such tests)"
        )
        return replace(run, doubt=Doubt(Reason.LOG_MISMATCH, detail))

    def _reported(self) -> frozenset[str]:
        """Return the named tests that the reporter can see because the runner itself reports them.

        For pytest, these are the tests in existing files. The lists may contain other ids: pytest's own tests print the
        output of an inner pytest. For other runners, these are the entries that look like the name of a test: the lists
        also contain first lines of descriptions and of output.
        """
        if self._program:
            return frozenset(test for test in self._named if _TEST_NAME.fullmatch(test))
        files = {*self._existing_files, *touched_files(self._task.test_patch), *self._task.hidden_files}
        return frozenset(test for test in self._named if file_of(test) in files)


def misreadings(task: Task, run: SuiteRun) -> tuple[Misreading, ...]:
    """Return what a task's parser misreads in a run's log; empty if the parser cannot read the log at all."""
    if not isinstance(task.grader, LogGrader) or not run.whole_log:
        return ()
    named = task.FAIL_TO_PASS + task.PASS_TO_PASS
    with contextlib.suppress(HarnessError):
        return harness.misread(task.grader.parser, run.whole_log, named, about=about(task))
    return ()


def about(task: Task) -> dict[str, str]:
    """Return the columns of a task's row that parsers may use."""
    return {"instance_id": task.instance_id, "repo": task.repo, "version": task.version}


_TEST_NAME = re.compile(r"\w+(?: \([\w.]+\))?")
_PROGRAM = re.compile(r"(?:^|[\s/])(runtests\.py|bin/test)(?=\s|$)")


def _program(grader: LogGrader) -> str:
    """Return the name of the program that runs the tests, if the hook of :data:`.RunnerKind.OTHER` must observe it."""
    if grader.reporter != "unittest":
        return ""
    match = _PROGRAM.search(grader.command)
    return match[1].rpartition("/")[2] if match else "unittest"


_STILL_JUDGED = frozenset({Reason.INTERRUPTED, Reason.USAGE_ERROR, Reason.NO_TESTS})
"""Doubts after which the log is still parsed: tests that are missing from it count as failed in the benchmarks."""


def _existing(box: Sandbox, files: set[str]) -> frozenset[str]:
    """Return the files that exist before the submission is applied."""
    if not any(files):  # names of unittest's and SymPy's tests contain no file
        return frozenset()
    script = 'for file; do [ ! -f "$file" ] || printf "%s\\n" "$file"; done'
    result = box.exec(["bash", "-c", script, "files", *sorted(filter(None, files))], timeout=60.0)
    return frozenset(result.stdout.splitlines())


def _command_doubt(result: ExecResult) -> Doubt | None:
    """Return why a run without a reporter is not believed, or None if it is believed."""
    if result.outcome is Outcome.TIMEOUT:
        return Doubt(Reason.TIMEOUT, f"the tests {result.fate}")
    if "memory" in result.limits_hit and result.exit_code != 0:
        return Doubt(Reason.OUT_OF_MEMORY, f"the sandbox ran out of memory; the test command: {result.fate}")
    if result.exit_code is None or 128 < result.exit_code <= _LAST_SIGNAL:
        return Doubt(Reason.KILLED, f"the test command ended with {result.fate}")
    if result.exit_code in NOT_FOUND:
        return Doubt(Reason.NOT_STARTED, f"{NOT_FOUND[result.exit_code]} (exit status {result.exit_code})")
    return _log_doubt(result)


def _log_doubt(result: ExecResult) -> Doubt | None:
    if result.dropped_stderr:
        return Doubt(Reason.REPORT_DAMAGED, f"the tests printed more than {LOG_LIMIT} bytes")
    return None


def _logs(report: Report, *, printed: bool) -> Iterator[str]:
    """Yield the reporter's outcomes as logs, one for each possible order of the tests.

    The parsers cut off ids at white space, and the last of several tests with the same id counts. The tests are in
    execution order, or as in pytest's summary, which lists failed tests last and has no ids of skipped tests.
    """
    yield as_log(report, printed=printed)
    if not printed:
        yield as_log(report, order=_SUMMARY)


def as_log(report: Report, *, printed: bool = False, order: Sequence[str] = ()) -> str:
    """Format the reporter's outcomes as a log for the benchmarks' parsers.

    Args:
        report: the reporter's lines.
        printed: whether to use the format of the runners of unittest, Django and SymPy instead of pytest's.
        order: outcomes in the order of their tests; tests with other outcomes follow. Empty: the order of execution.
    """
    lines = []
    ranks = {outcome: rank for rank, outcome in enumerate(order)}
    for test, outcome in sorted(report.outcomes().items(), key=lambda pair: ranks.get(pair[1], len(ranks))):
        if printed:
            status = "ok" if outcome == "passed" else "F"
            lines += [f"{test} ... {status if status == 'ok' else 'FAIL'}", f"{test} {status}"]
        else:
            status = _WORDS.get(outcome, "FAILED")
            lines += [f"{status} {test}", f"{test} {status} [100%]"]
    return "\n".join(lines) + "\n"
