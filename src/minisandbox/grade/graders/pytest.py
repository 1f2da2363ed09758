"""Grade with pytest: run the task's command with a plugin that reports every test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisandbox.errors import InvalidValue
from minisandbox.grade.judging import SuiteRun, doubt_about, log_of
from minisandbox.grade.reporter import Reporter, RunnerKind, run_reported
from minisandbox.sandbox import Sandbox

_OPTIONS = ("--continue-on-collection-errors",)
"""Run the remaining tests if a file cannot be collected, as in the runs that produced the lists of tests."""


@dataclass(frozen=True, slots=True)
class PytestRunner:
    """One run of a task's tests.

    Attributes:
        command: the task's test command: a shell command to which arguments can be appended.
        files: the test files to run, relative to the working directory; empty if the command chooses.
        timeout: the time limit of the run, in seconds.
        hash_seed: the seed of Python's string hashes.
        reporter: the reporter of this run.
    """

    command: str
    files: Sequence[str]
    timeout: float
    hash_seed: int = 0
    reporter: Reporter = field(default_factory=lambda: Reporter.make(RunnerKind.PYTEST))

    def install(self, box: Sandbox) -> None:
        """Write the plugin into the sandbox; see :meth:`.Reporter.install`."""
        self.reporter.install(box)

    def run(self, box: Sandbox, test_names: Sequence[str] = ()) -> SuiteRun:
        """Run the tests.

        Args:
            box: the sandbox.
            test_names: the tests to run, by their ids without parameters; empty for all.

        Returns:
            The results of the tests; code under test cannot make this function raise.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        # keep pytest's cache outside of the repository: options such as --lf would obey a cache in a submission
        cache = ("-o", f"cache_dir={self.reporter.directory}/cache")
        options = ("-p", self.reporter.module, *cache, *_OPTIONS, *self.files)
        environment = {
            **self.reporter.environment(box),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": str(self.hash_seed),
        }
        result, report = run_reported(
            box, self.command, options, timeout=self.timeout, env=environment, test_names=test_names
        )
        doubt = doubt_about(result, report)
        return SuiteRun(report, doubt, result.exit_code, result.duration, log_of(result))


def files_of(tests: Sequence[str]) -> tuple[str, ...]:
    """Return the files that contain tests, by their pytest node ids, sorted.

    Raises:
        InvalidValue: an id is not a pytest node id.
    """
    for test in tests:
        if "::" not in test:
            raise InvalidValue(
                f"{test!r} is not a pytest node id",
                reason="the task's tests are run by something else",
                hint="ids look like 'tests/test_a.py::test_b'; other runners need the log or the script grader",
            )
    return tuple(sorted({test.partition("::")[0] for test in tests}))
