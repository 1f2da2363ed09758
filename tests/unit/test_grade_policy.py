"""Protected paths, and what screening leaves of a submission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minisandbox.errors import PatchError
from minisandbox.grade import MAX_SUBMISSION, Flag, Policy
from minisandbox.grade.submission import screen
from minisandbox.patches import FileChange, FileStatus, parse_patch
from minisandbox.spec import PythonRecipe
from minisandbox.tasks import Form, Task


def patch_of(*paths: str) -> str:
    return "".join(f"diff --git a/{p} b/{p}\n--- a/{p}\n+++ b/{p}\n@@ -1 +1 @@\n-a\n+b\n" for p in paths)


def task(*, fix: tuple[str, ...] = ("pkg/core.py",), tests: tuple[str, ...] = ("tests/unit/test_core.py::t",)) -> Task:
    return Task("a__b-1", "a/b", "c0", "", patch_of(*fix), "", tests, ())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("README.md", True),
        ("docs/usage.rst", True),
        ("CHANGES.txt", True),
        ("tests/test_other.py", True),
        ("pkg/tests/data.json", True),
        ("pkg/test_tools.py", True),
        ("pkg/test/client.py", False),
        ("pkg/testing.py", False),
        ("pkg/data.txt", False),
        ("pkg/core.py", False),
        ("setup.py", False),
        ("docs/guide.rst", False),
    ],
)
def test_files_that_no_test_can_see(path: str, expected: bool) -> None:
    assert Policy.for_task(task(fix=("pkg/core.py", "docs/guide.rst"))).is_beside_the_point(path) is expected


def kind(path: str, policy: Policy, status: FileStatus = FileStatus.MODIFIED) -> str | None:
    return policy.why_protected(FileChange(path, status, path))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("pkg/core.py", None),
        ("pkg/other.py", None),
        ("README.md", None),
        ("pkg/coverage.py", None),
        ("pkg/unittest/cases.py", None),
        ("pkg/testing/tools.py", None),
        ("pkg/test/tools.py", None),
        ("tests/unit/test_core.py", "test_file"),
        ("tests/unit", "test_file"),
        ("tests/helpers.py", "test_directory"),
        ("tests/unit/data/x.bin", "test_directory"),
        ("conftest.py", "pytest_config"),
        ("pkg/deep/conftest.py", "pytest_config"),
        ("pytest.ini", "pytest_config"),
        ("tox.ini", "pytest_config"),
        ("setup.cfg", "pytest_config"),
        ("pyproject.toml", "pytest_config"),
        (".pytest.ini", "pytest_config"),
        ("sitecustomize.py", "start_up_hook"),
        ("pkg/usercustomize.py", "start_up_hook"),
        ("evil.pth", "start_up_hook"),
        ("pkg/core.pyc", "compiled_code"),
        ("pkg/_fast.cpython-311-x86_64-linux-gnu.so", "compiled_code"),
        ("pkg/__pycache__/x", "compiled_code"),
        ("src/pkg.egg-info/entry_points.txt", "package_metadata"),
        (".gitattributes", "git_metadata"),
        (".github/workflows/ci.yml", "git_metadata"),
        ("pytest.py", "shadows_runner"),
        ("_pytest/runner.py", "shadows_runner"),
        ("src/pluggy/__init__.py", "shadows_runner"),
        ("unittest/case.py", "shadows_runner"),
    ],
)
def test_kinds(path: str, expected: str | None) -> None:
    assert kind(path, Policy.for_task(task())) == expected


def test_new_modules_in_place_of_the_standard_library() -> None:
    policy = Policy.for_task(task())
    assert kind("json.py", policy, FileStatus.ADDED) == "shadows_runner"
    assert kind("typing/__init__.py", policy, FileStatus.ADDED) == "shadows_runner"
    assert kind("json.py", policy) is None, "the project has such a file already"
    assert kind("code/new.py", policy, FileStatus.ADDED) is None
    assert kind("pkg/json.py", policy, FileStatus.ADDED) is None


@pytest.mark.parametrize("path", ["org/python/core.py", "org/__init__.py", "org.py"])
def test_what_the_library_looks_for_and_does_not_find_is_not_there_to_be_found(path: str) -> None:
    """copy imports org.python.core, if it can, before the plugin is loaded."""
    assert kind(path, Policy.for_task(task()), FileStatus.ADDED) == "shadows_runner"
    assert kind(path, Policy.for_task(task())) is None
    assert kind(f"pkg/{path}", Policy.for_task(task()), FileStatus.ADDED) is None


@pytest.mark.parametrize(
    ("python", "refused", "not_refused"),
    [
        ("2.7", ("ConfigParser.py", "copy_reg.py", "parser.py", "imp.py"), ("pkg/Queue.py",)),
        ("3.6.15", ("dummy_threading.py", "parser.py", "asyncore.py"), ("ConfigParser.py", "commands.py")),
        (">=3.11", ("asyncore.py", "cgi.py", "json.py"), ("parser.py", "Queue.py")),
        ("3.13", ("json.py", "pdb/__init__.py", "_colorize.py", "_sha2.py"), ("new.py", "symbol.py", "compression.py")),
        ("3.14", ("compression/__init__.py", "_colorize.py"), ("parser.py",)),
    ],
)
def test_the_standard_library_is_that_of_the_tests_interpreter(
    python: str, refused: tuple[str, ...], not_refused: tuple[str, ...]
) -> None:
    policy = Policy.for_task(replace(task(), build=PythonRecipe(python=python)))
    assert [kind(path, policy, FileStatus.ADDED) for path in refused] == ["shadows_runner"] * len(refused)
    assert [kind(path, policy, FileStatus.ADDED) for path in not_refused] == [None] * len(not_refused)


def test_a_plain_diff_that_git_makes_a_file_of_is_judged_as_a_new_one() -> None:
    """It was applied, run before the plugin was loaded, and made every report 'passed'."""
    (change,) = parse_patch("--- a/shlex.py\n+++ b/shlex.py\n@@ -0,0 +1 @@\n+import os\n")
    assert Policy.for_task(task()).why_protected(change) == "shadows_runner"


def test_a_runner_that_the_path_leads_to_is_protected() -> None:
    environment = (("PYTHONPATH", "/opt/x:/testbed/third/party/:/testbed"),)
    policy = Policy.for_task(replace(task(), build=PythonRecipe(environment=environment)))
    assert kind("third/party/_pytest/runner.py", policy) == "shadows_runner"
    assert kind("third/_pytest/runner.py", policy) is None


def test_what_the_reference_changes_may_be_changed() -> None:
    policy = Policy.for_task(task(fix=("pyproject.toml", "src/_pytest/runner.py", "tests/helpers.py")))
    assert kind("pyproject.toml", policy) is None
    assert kind("setup.cfg", policy) == "pytest_config"
    assert kind("src/_pytest/fixtures.py", policy) is None, "the project is the runner itself"
    assert kind("_pytest/fixtures.py", policy) == "shadows_runner"
    assert kind("tests/helpers.py", policy) is None
    assert kind("tests/others.py", policy) == "test_directory"


def test_tests_beside_the_code_protect_only_themselves() -> None:
    policy = Policy.for_task(task(tests=("pkg/test_core.py::t",)))
    assert kind("pkg/test_core.py", policy) == "test_file"
    assert kind("pkg/new.py", policy) is None
    assert kind("pkg", policy) == "test_file", "a file in the place of the tests' directory"
    assert kind("pkg/pytest.py", policy) == "shadows_runner", "pytest puts the directory of a test on the import path"


def test_renames_are_judged_by_both_names() -> None:
    policy = Policy.for_task(task())
    assert policy.why_protected(FileChange("x.py", FileStatus.RENAMED, "conftest.py")) == "pytest_config"
    assert policy.why_protected(FileChange("conftest.py", FileStatus.RENAMED, "x.py")) == "pytest_config"


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("pkg/alias.py", b"core.py", None),
        ("docs/latest", b"../README", None),
        ("pkg/data", b"../tests/unit", None),
        ("pkg/core.py", b"other.py", None),
        ("pkg/core.py", b"/usr/core.py", "link_outside"),
        ("pkg/alias.py", b"../../elsewhere", "link_outside"),
        ("pkg/alias.py", b"", "link_outside"),
        ("conftest.py", b"pkg/hook.py", "pytest_config"),
        ("tests/unit/more", b"../../pkg", "test_directory"),
        ("tests", b"pkg", "test_file"),
        ("pluggy", b"pkg/other", "shadows_runner"),
        ("src/attr", b"../pkg", "shadows_runner"),
        ("json", b"pkg/json", "shadows_runner"),
        ("sitecustomize", b"pkg", "start_up_hook"),
        ("src", b"pkg", "shadows_import"),
        ("pkg/json", b"codec", None),
    ],
)
def test_links_are_judged_by_where_they_lead_and_by_what_they_would_import(
    path: str, target: bytes, expected: str | None
) -> None:
    change = FileChange(path, FileStatus.ADDED, path, link=target)
    assert Policy.for_task(task()).why_protected(change) == expected


def test_screening_leaves_out_and_says_so() -> None:
    change = screen(patch_of("pkg/core.py", "conftest.py", "tests/unit/test_core.py").encode(), Policy.for_task(task()))
    assert change.only == frozenset({"pkg/core.py"})
    assert change.leave_out == ("conftest.py", "tests/unit/test_core.py")
    assert change.flags == (Flag("pytest_config", "conftest.py"), Flag("test_file", "tests/unit/test_core.py"))
    assert not change.is_empty


@pytest.mark.parametrize("submission", [b"", patch_of("conftest.py").encode()])
def test_nothing_left_to_apply(submission: bytes) -> None:
    assert screen(submission, Policy.for_task(task())).is_empty


@pytest.mark.parametrize(
    "submission",
    [
        b"x" * (MAX_SUBMISSION + 1),
        b"no patch at all",
        b"--- a/../../etc/x\n+++ b/../../etc/x\n@@ -0,0 +1 @@\n+x\n",
        b"--- a//etc/x\n+++ b//etc/x\n@@ -0,0 +1 @@\n+x\n",
        b"\n \n",
        patch_of("a.py").replace("a\n", "\0\n").encode(),
        patch_of(".git/config").encode(),
    ],
)
def test_unsafe_submissions(submission: bytes) -> None:
    with pytest.raises(PatchError):
        screen(submission, Policy.for_task(task()))


def test_the_form_decides_nothing() -> None:
    smith = Task("a__b-1", "a/b", "c0", "", patch_of("pkg/core.py"), "", ("tests/t.py::t",), (), form=Form.SWESMITH)
    assert Policy.for_task(smith).allowed == {"pkg/core.py"}


class Counted(frozenset[str]):
    """Directories that count how often, and with how long names, they are asked for."""

    asked = 0

    def __contains__(self, path: object) -> bool:
        Counted.asked += len(str(path))
        return super().__contains__(path)


def test_a_deep_path_is_looked_at_as_far_as_the_deepest_root() -> None:
    """A path of 8,000 parts, of 16 KiB, took 64 million characters of names."""
    roots = Counted({"", "src", "third/party"})
    policy = replace(Policy.for_task(task()), roots=roots, elsewhere=frozenset({"src/compare"}))
    assert kind("a/" * 8_000 + "x.py", policy, FileStatus.ADDED) is None
    assert Counted.asked < 5 * 16_000
    assert kind("third/party/" + "pytest/" * 8_000, policy) == "shadows_runner"
    assert kind("src/compare/x.py", policy, FileStatus.ADDED) == "shadows_import"
