"""What the interpreter of a test command loads for runners other than pytest: it tells what they say of each test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import minisandbox.grade
from minisandbox.grade.graders.log import as_log
from minisandbox.grade.judging import doubt_about
from minisandbox.grade.report import Report
from minisandbox.tasks import harness
from minisandbox.types import ExecResult, Outcome

INSIDE = Path(minisandbox.grade.__file__).parent / "inside"
KEY = b"00ff" * 16
TESTS = """\
    import unittest

    class Sums(unittest.TestCase):
        def test_good(self):
            self.assertEqual(1 + 1, 2)

        def test_described(self):
            "Adds, and says so."

        @unittest.skip("not here")
        def test_skipped(self):
            pass

        @unittest.expectedFailure
        def test_expected(self):
            self.fail()

        def test_inner(self):
            class Inner(unittest.TestCase):
                def test_bad(self):
                    self.fail()

            suite = unittest.defaultTestLoader.loadTestsFromTestCase(Inner)
            unittest.TextTestRunner(stream=open("/dev/null", "w")).run(suite)
"""
FAILING = """
        def test_bad(self):
            self.fail()

        def test_broken(self):
            raise KeyError

        def test_parts(self):
            for number in range(3):
                with self.subTest(number=number):
                    self.assertEqual(number % 2, 0)
"""
RUNNER = """\
    import sys
    import unittest
    sys.path.insert(0, ".")
    import sums

    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(sums))
    sys.exit(not result.wasSuccessful())
"""
SYMPY = """\
    class SymPyTests:
        def matches(self, function):
            return True

    class PyTestReporter:
        def __init__(self):
            self.failed = 0

        def start(self, seed=None):
            pass

        def entering_test(self, function):
            self._active_f = function

        def test_pass(self, char="."):
            print(self._active_f.__name__, "ok")

        def test_fail(self, exc_info):
            self.failed += 1
            print(self._active_f.__name__, "F")

        def test_exception(self, exc_info):
            self.failed += 1

        def test_skip(self, v=None):
            pass

        def test_xfail(self):
            pass

        def test_xpass(self, v):
            pass

        def import_error(self, filename, exc_info):
            self.failed += 1

        def finish(self):
            return self.failed == 0
"""
SYMPY_TEST = """\
    import sys
    import types
    sys.path.insert(0, ".")
    from sympy.testing.runtests import PyTestReporter, SymPyTests

    reporter = PyTestReporter()
    reporter.start()
    for name in sys.argv[1:]:
        function = types.FunctionType(compile("def f():\\n    assert 0", "t.py", "exec").co_consts[0], {}, name)
        if not SymPyTests().matches(function):
            continue
        reporter.entering_test(function)
        try:
            function() if "bad" in name else None
            reporter.test_pass()
        except AssertionError:
            reporter.test_fail(sys.exc_info())
    sys.exit(0 if reporter.finish() else 1)
"""


def run(tmp_path: Path, program: str, *arguments: str, chosen: Sequence[str] = ()) -> tuple[Report, ExecResult, str]:
    """Run a program of the project with the hook, as a grading sandbox does."""
    hook = tmp_path / "hook"
    hook.mkdir()
    shutil.copy(INSIDE / "runner_hook.py", hook / "sitecustomize.py")
    shutil.copy(INSIDE / "report_lines.py", hook / "sitecustomize_lines.py")
    (key, key_writer), (reader, lines) = os.pipe(), os.pipe()
    os.write(key_writer, KEY + (json.dumps(list(chosen)).encode() if chosen else b""))
    os.close(key_writer)
    setting = f"{key}:{lines}={Path(program).name}"
    # another interpreter comes first, as setup commands do: it leaves the lines alone
    command = f'{sys.executable} -c "import unittest" && {sys.executable} {program} "$@"'
    with subprocess.Popen(
        ["bash", "-c", command, "tests", *arguments], cwd=tmp_path / "project", pass_fds=(key, lines), text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(hook), "MINISANDBOX_REPORT": setting},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        os.close(key)
        os.close(lines)
        with open(reader, "rb") as source:
            data = source.read()
        assert process.stdout is not None
        output = process.stdout.read()
    result = ExecResult("tests", Outcome.EXITED, process.returncode, None, b"", b"")
    return Report.parse(data, KEY), result, output


def _project(tmp_path: Path, **files: str) -> None:
    for name, text in files.items():
        path = tmp_path / "project" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def test_unittests_runner_is_told_test_by_test(tmp_path: Path) -> None:
    _project(tmp_path, sums=TESTS, tests__runtests=RUNNER)
    report, result, output = run(tmp_path, "tests/runtests.py")
    assert doubt_about(result, report) is None, (report, output)
    outcomes = {test.partition(" ")[0]: outcome for test, outcome in report.outcomes().items()}
    assert outcomes == {
        "test_good": "passed",
        "test_described": "passed",
        "test_inner": "passed",  # and nothing of the runner inside it
        "test_skipped": "skipped",
        "test_expected": "xfailed",
    }


def test_failures_errors_and_subtests_are_failures(tmp_path: Path) -> None:
    _project(tmp_path, sums=TESTS + FAILING, tests__runtests=RUNNER)
    report, result, output = run(tmp_path, "tests/runtests.py")
    assert doubt_about(result, report) is None, (report, output)
    assert result.exit_code == 1
    failed = {test.partition(" ")[0] for test, outcome in report.outcomes().items() if outcome == "failed"}
    assert failed == {"test_bad", "test_broken", "test_parts"}


def test_what_was_told_reads_like_the_log_to_the_benchmarks_parser(tmp_path: Path) -> None:
    _project(tmp_path, sums=TESTS + FAILING, tests__runtests=RUNNER)
    report, _, output = run(tmp_path, "tests/runtests.py")
    printed = harness.parse("swebench:django/django", output)
    told = harness.parse("swebench:django/django", as_log(report, printed=True))
    passed = {test for test, word in printed.items() if word == "PASSED"}
    assert "Adds, and says so." in passed
    assert passed == {test for test, word in told.items() if word == "PASSED"}


def test_a_runner_that_ends_early_is_seen_to(tmp_path: Path) -> None:
    _project(tmp_path, sums=TESTS + "\n    import os\n    os._exit(0)\n", tests__runtests=RUNNER)
    report, result, _ = run(tmp_path, "tests/runtests.py")
    doubt = doubt_about(result, report)
    assert doubt is not None
    assert result.exit_code == 0


def test_sympys_reporter_is_told_test_by_test(tmp_path: Path) -> None:
    _project(tmp_path, sympy__testing__runtests=SYMPY)
    (tmp_path / "project/sympy/__init__.py").touch()
    (tmp_path / "project/sympy/testing/__init__.py").touch()
    (tmp_path / "project/bin").mkdir()
    (tmp_path / "project/bin/test").write_text(textwrap.dedent(SYMPY_TEST))
    report, result, output = run(tmp_path, "bin/test", "test_one", "test_bad")
    assert doubt_about(result, report) is None, (report, output)
    assert report.outcomes() == {"test_one": "passed", "test_bad": "failed"}
    assert harness.parse("swebench:sympy/sympy", as_log(report, printed=True))["test_one"] == "PASSED"


def test_only_chosen_tests_run_and_a_failure_has_its_place(tmp_path: Path) -> None:
    _project(tmp_path, sums=TESTS + FAILING)
    (tmp_path / "project/runtests.py").write_text(textwrap.dedent(RUNNER))
    chosen = ["test_good (sums.Sums)", "Adds, and says so.", "test_bad (sums.Sums)"]
    report, _, output = run(tmp_path, "runtests.py", chosen=chosen)
    names = [test.partition(" ")[0] for test in report.outcomes()]
    assert sorted(names) == ["test_bad", "test_described", "test_good"], output
    (line,) = report.places.values()
    assert (tmp_path / "project/sums.py").read_text().splitlines()[line - 1].strip() == "self.fail()"


def test_sympy_runs_only_chosen_tests(tmp_path: Path) -> None:
    _project(tmp_path, sympy__testing__runtests=SYMPY)
    (tmp_path / "project/sympy/__init__.py").touch()
    (tmp_path / "project/sympy/testing/__init__.py").touch()
    (tmp_path / "project/bin").mkdir()
    (tmp_path / "project/bin/test").write_text(textwrap.dedent(SYMPY_TEST))
    report, _, _ = run(tmp_path, "bin/test", "test_one", "test_bad", "test_two", chosen=["test_two", "test_bad"])
    assert report.outcomes() == {"test_bad": "failed", "test_two": "passed"}
    assert report.places == {"test_bad": 2}
