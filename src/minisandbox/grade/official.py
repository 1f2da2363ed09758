"""Runs that the benchmarks' own parsers and rules judge: their test command as it stands, and what it printed.

What the log says is theirs to decide; whether it is believed is ours. Where pytest runs, our plugin reports beside it,
and a test that the log calls passed has to be one that the plugin saw passing: what the plugin saw is written as a log
of its own, and the same parser and rules judge that one too.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from minisandbox.grade.belief import Doubt, doubt_about
from minisandbox.grade.channel import FileChannel, ReportChannel
from minisandbox.grade.report import Report
from minisandbox.grade.runner import SuiteRun, log_of
from minisandbox.grade.verdict import Reason
from minisandbox.patches import touched_files
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task, file_of, harness
from minisandbox.types import ExecResult, MiB, Outcome

LOG_LIMIT = 128 * MiB
"""Bytes kept of what a test command prints: half of its head, half of its tail."""

_PLUGIN = Path(__file__).with_name("inside") / "report_plugin.py"
_WORDS = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED", "xfailed": "XFAIL"}


class OfficialRunner:
    """One run of a benchmark's own test command.

    Args:
        task: the task.
        timeout: seconds the run may take.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self._task = task
        self._timeout = timeout
        self._module = f"report_{secrets.token_hex(6)}"
        self._directory = f"/run/{secrets.token_hex(6)}"
        self._channel: ReportChannel = FileChannel(self._directory)
        self._reports = task.test_runner == "pytest"
        self._named = task.FAIL_TO_PASS + task.PASS_TO_PASS
        self._there: frozenset[str] = frozenset()

    def install(self, box: Sandbox) -> None:
        """Put the plugin into the sandbox; before the submission is, so that a full disk cannot keep it out.

        Raises:
            FileAccessError: it cannot be written.
            SandboxGone: the sandbox has ended.
        """
        if self._reports:
            box.files.write_bytes(f"{self._directory}/{self._module}.py", _PLUGIN.read_bytes(), mode=0o444)
            self._there = _existing(box, {file_of(test) for test in self._named})

    def run(self, box: Sandbox) -> SuiteRun:
        """Run the tests.

        Returns:
            What they showed; whatever the code under test does, it is a value.

        Raises:
            SandboxGone: the sandbox has ended.
            HarnessFailed: the benchmark's own code could not read the log.
            MissingExtra: the benchmark's own code is not installed.
        """
        options = ("-p", self._module) if self._reports else ()
        argv = ["bash", "-c", f'exec 2>&1; {self._task.test_command} "$@"', "tests", *options]
        result = box.exec(argv, timeout=self._timeout, env=self._environment(box))
        report = self._channel.collect(box) if self._reports else Report()
        run = SuiteRun(report, None, result.exit_code, result.duration, log_of(result))
        doubt = (doubt_about(result, report) if self._reports else None) or _about_log(result)
        if doubt is not None and doubt.reason not in _STILL_JUDGED:
            return replace(run, doubt=doubt)
        return self._judged(replace(run, doubt=doubt, whole_log=result.stdout))

    def _judged(self, run: SuiteRun) -> SuiteRun:
        task = self._task
        said = harness.judge(task.test_parser, run.whole_log, task.FAIL_TO_PASS, task.PASS_TO_PASS)
        run = replace(run, judgement=said)
        if not said.resolved or not self._reports:
            return run
        reported = self._reported()
        lists = [[test for test in tests if test in reported] for tests in (task.FAIL_TO_PASS, task.PASS_TO_PASS)]
        seen = harness.judge(task.test_parser, as_log(run.report), *lists)
        if seen.resolved:
            return run
        missing = (*seen.failed_fail_to_pass, *seen.failed_pass_to_pass)
        detail = f"the log says that {missing[0]} passed, and pytest's own report does not ({len(missing)} such tests)"
        return replace(run, doubt=Doubt(Reason.LOG_MISMATCH, detail))

    def _reported(self) -> frozenset[str]:
        """The named tests that pytest reports itself: those of files that there are.

        The tests of pytest print what an inner pytest prints, and the lists have ids that are found in that alone.
        """
        files = {*self._there, *touched_files(self._task.test_patch), *self._task.hidden_files}
        return frozenset(test for test in self._named if file_of(test) in files)

    def _environment(self, box: Sandbox) -> dict[str, str]:
        if not self._reports:
            return {}
        known = dict(box.image.environment).get("PYTHONPATH")
        path = f"{known}:{self._directory}" if known else self._directory
        variables = {**self._channel.environment, "PYTHONPATH": path}
        # tox hands on what it is told to; this is how it is told more (tox 4: "Configuration override")
        return {**variables, "TOX_OVERRIDE": f"testenv.pass_env+={','.join(variables)}"}


_STILL_JUDGED = frozenset({Reason.INTERRUPTED, Reason.USAGE_ERROR, Reason.NO_TESTS})
"""Doubts about runs whose log is read all the same: it lacks tests, which is how the benchmarks fail them."""


def _existing(box: Sandbox, files: set[str]) -> frozenset[str]:
    """Which of some files there are, before anything of a submission is there to say so."""
    script = 'for file; do [ ! -f "$file" ] || printf "%s\\n" "$file"; done'
    result = box.exec(["bash", "-c", script, "files", *sorted(filter(None, files))], timeout=60.0)
    return frozenset(result.stdout.splitlines())


def _about_log(result: ExecResult) -> Doubt | None:
    if result.outcome is Outcome.TIMEOUT:
        return Doubt(Reason.TIMEOUT, f"the tests {result.fate}")
    if result.exit_code is None or result.exit_code > 128:
        return Doubt(Reason.KILLED, f"the test command ended with {result.fate}")
    if result.dropped_stdout:
        return Doubt(Reason.REPORT_DAMAGED, f"the tests printed more than {LOG_LIMIT} bytes")
    return None


def as_log(report: Report) -> str:
    """Return what the plugin saw, as a log that the parsers for pytest's summary and for its verbose output read."""
    lines = []
    for test, outcome in report.outcomes().items():
        word = _WORDS.get(outcome, "FAILED")
        lines += [f"{word} {test}", f"{test} {word} [100%]"]
    return "\n".join(lines) + "\n"
