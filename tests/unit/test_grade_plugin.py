"""The plugin inside a grading sandbox, under a real pytest: what it reports is what happened."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import iniconfig
import pytest

import minisandbox.grade
from minisandbox.grade.judging import doubt_about
from minisandbox.grade.report import Report
from minisandbox.grade.verdict import Reason
from minisandbox.types import ExecResult, Outcome

PLUGIN = Path(minisandbox.grade.__file__).parent / "inside" / "report_plugin.py"
KEY = b"00ff"


@dataclass(frozen=True, slots=True)
class Run:
    report: Report
    exit_code: int
    output: str

    @property
    def reason(self) -> Reason | None:
        code = None if self.exit_code < 0 else self.exit_code
        how = Outcome.SIGNALED if code is None else Outcome.EXITED
        doubt = doubt_about(ExecResult("pytest", how, code, None, b"", b""), self.report)
        return None if doubt is None else doubt.reason


def run(
    tmp_path: Path,
    *arguments: str,
    program: Sequence[str] = ("-m", "pytest"),
    modules: Sequence[str] = (),
    **files: str,
) -> Run:
    """Run pytest with the plugin on files whose names come without ``.py``; ``modules`` are those of the image."""
    project, plugin = tmp_path / "project", tmp_path / "plugin"
    project.mkdir(exist_ok=True)
    plugin.mkdir()
    for name, source in files.items():
        (project / f"{name}.py").write_text(textwrap.dedent(source))
    shutil.copy(PLUGIN, plugin / "report_abc.py")
    shutil.copy(PLUGIN.with_name("report_lines.py"), plugin / "report_abc_lines.py")
    shutil.copy(PLUGIN.with_name("early_start.py"), plugin / "sitecustomize.py")
    (plugin / "repository").write_text("\n".join((str(project), *modules)))
    command = [sys.executable, *program, "-p", "report_abc", "-p", "no:cacheprovider", *arguments]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join(map(str, filter(Path.exists, (plugin, tmp_path / "later")))),
    }
    (key, key_writer), (reader, lines) = os.pipe(), os.pipe()
    os.write(key_writer, KEY)
    os.close(key_writer)
    environment["MINISANDBOX_REPORT"] = f"{key}:{lines}"
    with subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        pass_fds=(key, lines),
    ) as process:  # fmt: skip
        os.close(key)
        os.close(lines)
        with open(reader, "rb") as file:
            data = file.read()
        output = process.communicate()[0]
    return Run(Report.parse(data, KEY), process.returncode, output)


def test_outcomes(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        test_a="""
        import pytest, unittest

        def test_pass(): pass
        def test_fail(): assert 0
        def test_skip(): pytest.skip()
        @pytest.mark.xfail
        def test_xfail(): assert 0
        @pytest.mark.xfail
        def test_xpass(): pass
        @pytest.mark.xfail(strict=True)
        def test_strict(): pass
        @pytest.fixture
        def broken(): raise ValueError
        def test_setup(broken): pass
        @pytest.fixture
        def breaks():
            yield
            raise ValueError
        def test_teardown(breaks): pass
        @pytest.mark.parametrize("word", ["a b", "caf\\xe9", "x/y::z"])
        def test_words(word): pass
        class TestUnit(unittest.TestCase):
            def test_parts(self):
                with self.subTest("good"): pass
                with self.subTest("bad"): self.fail()
            @unittest.expectedFailure
            def test_expected(self): self.fail()
        """,
    )
    assert seen.reason is None, seen.output
    assert seen.report.outcomes() == {
        "test_a.py::test_pass": "passed",
        "test_a.py::test_fail": "failed",
        "test_a.py::test_skip": "skipped",
        "test_a.py::test_xfail": "xfailed",
        "test_a.py::test_xpass": "xpassed",
        "test_a.py::test_strict": "failed",
        "test_a.py::test_setup": "error",
        "test_a.py::test_teardown": "error",
        "test_a.py::test_words[a b]": "passed",
        "test_a.py::test_words[caf\\xe9]": "passed",
        "test_a.py::test_words[x/y::z]": "passed",
        "test_a.py::TestUnit::test_expected": "xfailed",
        "test_a.py::TestUnit::test_parts": "failed",
    }


def test_a_file_that_cannot_be_collected_costs_only_itself(tmp_path: Path) -> None:
    seen = run(tmp_path, "--continue-on-collection-errors", test_a="import nowhere_at_all", test_b="def test_b(): pass")
    assert seen.reason is None, seen.output
    assert seen.report.uncollected == ("test_a.py",)
    assert seen.report.outcomes() == {"test_b.py::test_b": "passed"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os._exit(0)", Reason.NO_END),
        ("import sys; sys.exit(0)", Reason.INTERNAL_ERROR),
        ("def test_a():\n    import os; os._exit(0)", Reason.NO_END),
        ("def test_a():\n    import os; os.kill(os.getpid(), 9)", Reason.KILLED),
        ("def test_a():\n    raise KeyboardInterrupt", Reason.INTERRUPTED),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef test_a(): assert 0", Reason.EXIT_FORGED),
        ("x = 1", Reason.NO_TESTS),
    ],
)
def test_runs_that_are_not_believed(tmp_path: Path, source: str, reason: Reason) -> None:
    seen = run(tmp_path, test_a=source)
    assert seen.reason is reason, seen.output


def test_a_conftest_that_cannot_be_imported(tmp_path: Path) -> None:
    seen = run(tmp_path, conftest="import nowhere_at_all", test_a="def test_a(): pass")
    assert seen.reason is Reason.USAGE_ERROR, seen.output


def test_what_tests_do_to_the_interpreter_stays_theirs(tmp_path: Path) -> None:
    """They replace functions that the plugin uses, and fork children that go on as if they were pytest."""
    seen = run(
        tmp_path,
        test_a="""
        import os, json

        def broken(*arguments): raise RuntimeError

        def test_patched(monkeypatch):
            for name in ("os.write", "os.open", "os.getpid", "json.dumps", "json.JSONEncoder.encode"):
                monkeypatch.setattr(name, broken)

        def test_forks():
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)

        def test_last(): pass
        """,
    )
    assert seen.reason is None, seen.output
    assert set(seen.report.outcomes().values()) == {"passed"}, seen.output
    assert len(seen.report.outcomes()) == 3


def test_the_tests_do_not_see_the_channel(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        test_a="""
        import os, subprocess, sys

        def test_a():
            assert "MINISANDBOX_REPORT" not in os.environ
            assert "PYTHONPATH" not in os.environ
            inside = subprocess.check_output([sys.executable, "-c", "import sys; print(sys.path)"])
            assert b"plugin" not in inside
        """,
    )
    assert seen.reason is None, seen.output
    assert seen.report.outcomes() == {"test_a.py::test_a": "passed"}


def test_a_line_of_somebody_else_is_seen(tmp_path: Path) -> None:
    code = "for n in range(300, 310):\n    try: os.write(n, b'[1]\\n')\n    except OSError: pass\n"
    seen = run(tmp_path, test_a=f"import os\n{code}def test_a(): pass")
    assert seen.reason is Reason.REPORT_DAMAGED, seen.output


def test_without_its_variable_it_does_nothing(tmp_path: Path) -> None:
    seen = run(tmp_path, test_a="import os\ndef test_a(): pass", conftest="")
    assert seen.reason is None
    shutil.copy(PLUGIN, tmp_path / "project" / "report_abc.py")
    shutil.copy(PLUGIN.with_name("report_lines.py"), tmp_path / "project" / "report_abc_lines.py")
    command = [sys.executable, "-m", "pytest", "-p", "report_abc", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path / "project", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# --- what is loaded before what ---------------------------------------------------------------------------------------

TELL = """
import sys
with open("seen", "a") as seen:
    seen.write("%s %s\\n" % (__name__, "report_abc" in sys.modules))
"""
LOOKED_FOR = (
    "runpy",
    "argparse",
    "iniconfig",
    "pluggy",
    "colorama",
    "tomllib",
    "org",
    "argcomplete",
    "shlex",
    "pygments",
)


@pytest.mark.parametrize("program", [("-m", "pytest"), ("-W", "default", "-Bm", "pytest")])
def test_nothing_of_the_repository_runs_before_the_plugin(tmp_path: Path, program: Sequence[str]) -> None:
    files = dict.fromkeys(LOOKED_FOR, TELL)
    seen = run(tmp_path, program=program, **files, test_a="import runpy, org\ndef test(): assert 'org' in repr(org)\n")
    assert seen.reason is None, seen.output
    assert seen.report.outcomes() == {"test_a.py::test": "passed"}
    assert set((tmp_path / "project" / "seen").read_text().splitlines()) == {"org True"}


def test_without_an_early_start_it_would(tmp_path: Path) -> None:
    """The control of the test above: a program of its own starts pytest."""
    start = "import sys, pytest\nsys.exit(pytest.main())\n"
    seen = run(tmp_path, program=("start.py",), start=start, iniconfig=TELL, test_a="def test(): pass\n")
    assert "iniconfig False" in (tmp_path / "project" / "seen").read_text()
    assert seen.report.end is None


def test_a_repository_of_what_pytest_itself_imports(tmp_path: Path) -> None:
    """Its own modules are tested, not those of the same names that are installed."""
    (tmp_path / "project").mkdir()
    shutil.copytree(Path(iniconfig.__file__).parent, tmp_path / "project" / "iniconfig")
    test = "import iniconfig, os\ndef test(): assert iniconfig.__file__.startswith(os.getcwd())\n"
    seen = run(tmp_path, modules=("iniconfig", "setup"), test_a=test)
    assert seen.report.outcomes() == {"test_a.py::test": "passed"}, seen.output
    assert seen.reason is None


def test_a_program_that_becomes_pytest(tmp_path: Path) -> None:
    start = "import os, sys\nos.execv(sys.executable, [sys.executable, '-m', 'pytest', *sys.argv[1:]])\n"
    seen = run(tmp_path, program=("start.py",), start=start, test_a="def test(): pass\n")
    assert seen.report.outcomes() == {"test_a.py::test": "passed"}, seen.output


def test_the_sitecustomize_that_was_there_runs_too(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text("import builtins\nbuiltins.was_there = True\n")
    seen = run(tmp_path, test_a="def test(): assert was_there\n")
    assert seen.report.outcomes() == {"test_a.py::test": "passed"}, seen.output
