"""A tiny project with its pytest beside it, as images: grading for real, without a package index."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import make_once
from tests.vendored import vendor_pytest

from minisandbox.images import Image, build
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.tasks import Form, PytestGrader, Task

FILES = {
    "calc/__init__.py": "",
    "calc/core.py": "def add(a, b):\n    return a + b\n    # that is all\n\n\ndef double(a):\n    return 2 * a\n",
    "setup.cfg": "[tool:pytest]\ntestpaths = tests\n",
    "tests/helper.py": "def same(a, b):\n    return a == b\n",
    "tests/test_add.py": "from calc.core import add\nfrom helper import same\n\n\ndef test_add():\n"
    "    assert same(add(2, 3), 5)\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
    "tests/test_double.py": "from calc.core import double\n\n\ndef test_double():\n    assert double(2) == 4\n",
}
BUG = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    return a + b
+    return a - b
     # that is all
"""
FIX = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -6,2 +6,6 @@
 def double(a):
     return 2 * a
+
+
+def triple(a):
+    return 3 * a
"""
TEST_PATCH = """\
diff --git a/tests/test_double.py b/tests/test_double.py
--- a/tests/test_double.py
+++ b/tests/test_double.py
@@ -4,2 +4,8 @@
 def test_double():
     assert double(2) == 4
+
+
+def test_triple():
+    from calc import core
+
+    assert core.triple(2) == 6
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,2 @@
+def test_new():
+    assert True
"""


@pytest.fixture(scope="session")
def source(shared: Path) -> Path:
    """The project's directory."""

    def write(root: Path) -> None:
        for name, text in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        vendor_pytest(root / "vendor")

    return make_once(shared / "calc", write)


@pytest.fixture(scope="session")
def store(shared_store: Store) -> Store:
    """The store of all workers: images of one name differ where tests change a task, unless ``images`` made them."""
    return shared_store


@pytest.fixture(scope="session")
def smith(source: Path) -> Task:
    """A task of SWE-smith's form: add() subtracts."""
    return Task(
        instance_id="calc__smith-1",
        repo="example/calc",
        base_commit="",
        problem_statement="add() subtracts",
        patch=BUG,
        test_patch="",
        FAIL_TO_PASS=("tests/test_add.py::test_add",),
        PASS_TO_PASS=("tests/test_add.py::test_zero", "tests/test_double.py::test_double"),
        form=Form.SWESMITH,
        build=PythonRecipe(
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            source=LocalSource(source),
            environment=(("PYTHONPATH", "/testbed/vendor"),),
        ),
        grader=PytestGrader(timeout=60.0),
    )


@pytest.fixture(scope="session")
def images(store: Store) -> Callable[[Task], Image]:
    """Return a task's image, built once, under a name that no other has."""

    def make(task: Task) -> Image:
        recipe = task.recipe()
        digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
        return build(recipe, store=store, name=f"{task.instance_id}-{digest}")

    return make


@pytest.fixture(scope="session")
def smith_image(smith: Task, store: Store) -> Image:
    """The image of ``smith``, under the task's own name."""
    return build(smith.recipe(), store=store, name=smith.instance_id)


@pytest.fixture
def bench(smith: Task) -> Task:
    """A task of SWE-bench's form on the same source."""
    return replace(
        smith,
        instance_id="calc__bench-1",
        patch=FIX,
        test_patch=TEST_PATCH,
        form=Form.SWEBENCH,
        FAIL_TO_PASS=("tests/test_double.py::test_triple",),
        PASS_TO_PASS=("tests/test_double.py::test_double", "tests/test_new.py::test_new"),
    )
