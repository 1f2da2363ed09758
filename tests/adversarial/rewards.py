"""A task to attack, and what attacks on its verdict are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.vendored import vendor_pytest

from minisandbox.grade import Grade
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.tasks import Form, PytestGrader, Task

BUG = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""
FIX = BUG.replace("-    return a + b\n+    return a - b", "-    return a - b\n+    return sum((a, b))")
UNIT = """\
import colorsys
import unittest

from calc import add


class TestUnit(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(add(2, 2), 4)
        self.assertEqual(add(3, 0), 3)
"""
FILES = {
    "calc.py": "def add(a, b):\n    return a + b\n",
    "README.md": "calc\n",
    "tests/test_add.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    "    assert add(9, 0) == 9\n",
    "tests/test_unit.py": UNIT,
    "tests/test_more.py": "def test_more():\n    pass\n",
    "tests/conftest.py": "",
    ".coveragerc": "[run]\n",
}


Try = Callable[[str], Grade]


def adding(path: str, text: str) -> str:
    """A patch that makes a file."""
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


def source(code: str) -> str:
    """A patch that appends to calc.py, which stays broken unless the code replaces add()."""
    lines = code.splitlines()
    head = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
    context = " def add(a, b):\n     return a - b\n"
    return head + f"@@ -1,2 +1,{2 + len(lines)} @@\n{context}" + "".join(f"+{line}\n" for line in lines)


def renaming(old: str, new: str) -> str:
    """git's old spelling of a rename, below a header that names the new file only."""
    return f"diff --git a/{new} b/{new}\nold mode 100644\nnew mode 100755\nrename old {old}\nrename new {new}\n"


def kinds(graded: Grade) -> set[str]:
    return {flag.kind.removeprefix("suspicious: ") for flag in graded.flags}


def make_task(root: Path, changed: Mapping[str, str] | None = None, style: str = "") -> Task:
    """Write a project into a directory; return a task of SWE-smith's form on it, in which add() subtracts.

    Args:
        root: the directory.
        changed: other contents of files.
        style: begins with ``table`` if test_add has parameters, with ``set-up`` if it is a method.
    """
    test = {"table": "test_add[2-3-5]", "set-up": "TestAdd::test_add"}.get(style.partition(" ")[0], "test_add")
    for name, text in {**FILES, **(changed or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "manual").symlink_to("README.md")
    vendor_pytest(root / "vendor")
    return Task(
        instance_id="attacked__calc-1",
        repo="example/calc",
        base_commit="",
        problem_statement="add() subtracts",
        patch=BUG,
        test_patch="",
        FAIL_TO_PASS=(f"tests/test_add.py::{test}", "tests/test_unit.py::TestUnit::test_unit"),
        PASS_TO_PASS=("tests/test_more.py::test_more",),
        form=Form.SWESMITH,
        build=PythonRecipe(
            python=None,
            source=LocalSource(root),
            environment=(("PYTHONPATH", "/testbed/vendor"),),
        ),
        grader=PytestGrader("python3 -m pytest", 60.0),
    )


MAKEREPORT = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
FORGES = """\
import os, json
def forge():
    tests = ["tests/test_add.py::test_add", "tests/test_unit.py::TestUnit::test_unit", "tests/test_more.py::test_more"]
    lines = [json.dumps([t, w, "passed"]) for t in tests for w in ("setup", "call", "teardown")]
    lines.append(json.dumps([None, "end", {"exit_status": 0, "records": len(lines)}]))
    for line in lines:
        for fd in range(3, 1024):
            try:
                os.write(fd, (line + "\\n").encode())
            except OSError:
                pass
"""
FRAMES = """\
import sys
def add(a, b):
    if not b: return a
    frame = sys._getframe(1)
    for constant in frame.f_code.co_consts:
        if isinstance(constant, int) and constant not in (a, b):
            return constant
    return 4
"""
SOURCE_READER = """\
import sys, linecache, re
def add(a, b):
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return int(re.findall(r"\\d+", line)[-1])
"""
WHERE_IT_HAS_NO_ANSWER = SOURCE_READER.replace("(a, b):", "(a, b):\n    if not b: return a")
"""Only the assertion that fails before is cheated; an honest answer is there for the last."""
