"""The pytest grader: the task's own command, with our plugin, in a sandbox that is ready for it."""

from __future__ import annotations

from collections.abc import Sequence

from minisandbox.errors import InvalidValue
from minisandbox.grade.judging import SuiteRun, doubt_about, log_of
from minisandbox.grade.reporter import Kind, Reporter, run_reported
from minisandbox.sandbox import Sandbox

_OPTIONS = ("-p", "no:cacheprovider", "--continue-on-collection-errors")
"""A file that cannot be collected costs its own tests only: the same for the lists as they were measured."""


class PytestRunner:
    """One run of a task's tests.

    Args:
        command: the task's test command, a shell command to which arguments can be appended.
        files: files to run, relative to the workdir; none for what the command itself chooses.
        timeout: seconds the run may take.
    """

    def __init__(self, command: str, files: Sequence[str], timeout: float) -> None:
        self._command = command
        self._files = tuple(files)
        self._timeout = timeout
        self._reporter = Reporter.make(Kind.PYTEST)

    def install(self, box: Sandbox) -> None:
        """Put the plugin into the sandbox; see :meth:`.Reporter.install`."""
        self._reporter.install(box)

    def run(self, box: Sandbox) -> SuiteRun:
        """Run the tests.

        Returns:
            What they showed; whatever the code under test does, it is a value.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        options = ("-p", self._reporter.module, *_OPTIONS, *self._files)
        result, report = run_reported(box, self._command, options, timeout=self._timeout, env=self._environment(box))
        doubt = doubt_about(result, report)
        return SuiteRun(report, doubt, result.exit_code, result.duration, log_of(result))

    def _environment(self, box: Sandbox) -> dict[str, str]:
        return {**self._reporter.environment(box), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}


def files_of(tests: Sequence[str]) -> tuple[str, ...]:
    """Return the files that hold pytest node ids, sorted.

    Raises:
        InvalidValue: an id is not pytest's.
    """
    for test in tests:
        if "::" not in test:
            raise InvalidValue(
                f"{test!r} is not a pytest node id",
                reason="the task's tests are run by something else",
                hint="only pytest can grade so far; ids look like 'tests/test_a.py::test_b'",
            )
    return tuple(sorted({test.partition("::")[0] for test in tests}))
