"""Attacks on the verdict: submissions that fix nothing must not resolve, and must not make their failure ours."""

from __future__ import annotations

import importlib.metadata
import tracemalloc
from pathlib import Path

import pytest

from minisandbox.grade import Reason, Verdict, grade
from minisandbox.grade.report import Report
from minisandbox.images import Image, build
from minisandbox.store import Store
from minisandbox.tasks import BuildSpec, Form, SourceSpec, Task

pytestmark = pytest.mark.kernel

BUG = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""
FILES = {
    "calc.py": "def add(a, b):\n    return a + b\n",
    "tests/test_add.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
    "tests/test_more.py": "def test_more():\n    pass\n",
    "tests/conftest.py": "",
}


def vendor_pytest(target: Path) -> None:
    """Copy pytest and what it needs out of the environment that runs these tests."""
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.distribution(name).files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                place = target / str(file)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(Path(str(file.locate())).read_bytes())


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A task of SWE-smith's form: add() subtracts."""
    root = tmp_path_factory.mktemp("calc")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    vendor_pytest(root / "vendor")
    return Task(
        instance_id="attacked__calc-1",
        repo="example/calc",
        base_commit="",
        problem_statement="add() subtracts",
        patch=BUG,
        test_patch="",
        FAIL_TO_PASS=("tests/test_add.py::test_add",),
        PASS_TO_PASS=("tests/test_more.py::test_more",),
        form=Form.SWESMITH,
        build=BuildSpec(
            python=None,
            source=SourceSpec("local", (("path", str(root)),)),
            environment=(("PYTHONPATH", "/testbed/vendor"),),
        ),
        test_command="python3 -m pytest",
        test_timeout=60.0,
    )


@pytest.fixture(scope="module")
def image(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return build(task.recipe(), store=Store.open(tmp_path_factory.mktemp("store")), name="attacked")


def adding(path: str, text: str) -> str:
    """A patch that makes a file."""
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


def renaming(old: str, new: str) -> str:
    """git's old spelling of a rename, below a header that names the new file only."""
    return f"diff --git a/{new} b/{new}\nold mode 100644\nnew mode 100755\nrename old {old}\nrename new {new}\n"


PLUGIN = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
ENTRY_POINT = "[pytest11]\nplugin = evil_plugin\n"
START_UP = """\
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("test_"):
            sys.meta_path.remove(self)
            from _pytest.reports import TestReport
            original = TestReport.from_item_and_call.__func__
            def lie(cls, item, call):
                call.excinfo = None
                return original(cls, item, call)
            TestReport.from_item_and_call = classmethod(lie)
sys.meta_path.insert(0, Finder())
"""
# gives the real one, so that pytest goes on
SHADOW = """\
del sys.modules["pygments"]
here = sys.path.pop(0)
import pygments
sys.path.insert(0, here)
"""
HACKS = {
    "metadata": adding("evil.DIST-INFO/entry_points.txt", ENTRY_POINT) + adding("evil_plugin.py", PLUGIN),
    "egg": adding("Evil.Egg-Info/entry_points.txt", ENTRY_POINT) + adding("evil_plugin.py", PLUGIN),
    "start-up package": adding("vendor/sitecustomize/__init__.py", START_UP),
    "dependency": adding("pygments/__init__.py", START_UP + SHADOW),
}


@pytest.mark.parametrize("hack", HACKS.values(), ids=HACKS.keys())
def test_what_pytest_would_load_is_left_out(task: Task, image: Image, hack: str) -> None:
    graded = grade(task, image, hack.encode())
    assert (graded.verdict, graded.reason) == (Verdict.FAILED, Reason.TESTS_NOT_PASSED), graded
    assert graded.flags


def test_a_path_with_a_nul_is_the_submissions_fault(task: Task, image: Image) -> None:
    path = r'"a/x\000y/conftest.py" "b/x\000y/conftest.py"'
    graded = grade(task, image, f"diff --git {path}\nold mode 100644\nnew mode 100755\n".encode())
    assert (graded.verdict, graded.reason) == (Verdict.PATCH_INVALID, Reason.PATCH_INVALID), graded


def test_a_number_of_many_digits_is_the_submissions_fault(task: Task, image: Image) -> None:
    submission = b"--- a/calc.py\n+++ b/calc.py\n@@ -1," + b"9" * 5000 + b" +1 @@\n-a\n+b\n"
    graded = grade(task, image, submission)
    assert (graded.verdict, graded.reason) == (Verdict.PATCH_INVALID, Reason.PATCH_INVALID), graded


def test_a_protected_file_is_not_renamed_away(task: Task, image: Image) -> None:
    graded = grade(task, image, renaming("tests/test_more.py", "more.py").encode())
    assert graded.reason in {Reason.PATCH_INVALID, Reason.TESTS_NOT_PASSED}, graded
    assert ("tests/test_more.py::test_more", "missing") not in graded.outcomes


def test_a_report_of_many_short_lines_costs_no_memory() -> None:
    data = b"x\ny" * (4 << 20)
    tracemalloc.start()
    try:
        report = Report.parse(data, "nonce")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.damage
    assert peak < 1 << 20
