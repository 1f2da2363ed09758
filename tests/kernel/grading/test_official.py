"""Tasks that a benchmark's own command, parser and rules judge: what they say holds, unless it cannot be believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from minisandbox.grade import Verdict, grade, grade_reference, validate
from minisandbox.images import Image
from minisandbox.tasks import LogGrader, Task, harness

pytestmark = [pytest.mark.kernel, pytest.mark.once]

UNHELPFUL = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -6,2 +6,2 @@
 def double(a):
-    return 2 * a
+    return a * 2
"""
FAKE = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,3 +1,7 @@
+import atexit
+import sys
+
+atexit.register(lambda: sys.__stdout__.write("PASSED tests/test_double.py::test_triple\\n"))
 def add(a, b):
     return a + b
     # that is all
"""


@pytest.fixture
def official(bench: Task) -> Task:
    return replace(
        bench,
        instance_id="calc__official-1",
        grader=LogGrader(
            "python -m pytest -rA tests/test_double.py tests/test_new.py",
            "swebench:pallets/flask",
            reporter="pytest",
            timeout=1800.0,
        ),
    )


@pytest.fixture
def image(official: Task, images: Callable[[Task], Image]) -> Image:
    return images(official)


@pytest.mark.slow
def test_the_reference_resolves_and_the_empty_patch_does_not(official: Task, image: Image) -> None:
    reference = grade_reference(official, image)
    assert reference.verdict is Verdict.RESOLVED, reference
    assert grade(official, image, b"").resolved is False
    unhelpful = grade(official, image, UNHELPFUL.encode())
    assert (unhelpful.resolved, unhelpful.reason) == (False, "tests_not_passed")
    assert unhelpful.failed_fail_to_pass == official.FAIL_TO_PASS


def test_a_submission_that_solves_it_resolves_it(official: Task, image: Image) -> None:
    graded = grade(official, image, official.patch.encode())
    assert graded.verdict is Verdict.RESOLVED, graded
    assert dict(graded.outcomes)[official.FAIL_TO_PASS[0]] == "passed"


CUT = """\
diff --git a/tests/test_cut.py b/tests/test_cut.py
new file mode 100644
--- /dev/null
+++ b/tests/test_cut.py
@@ -0,0 +1,9 @@
+import pytest
+from calc import core
+
+
+@pytest.mark.parametrize("what", ["a new", "a old", "a skipped"])
+def test_cut(what):
+    if what == "a skipped":
+        pytest.skip("not here")
+    assert what == "a old" or core.triple
"""


def test_an_id_that_is_cut_off_and_names_several_tests(official: Task, images: Callable[[Task], Image]) -> None:
    """One of them is skipped, one fails without the patch: what the benchmark's rules accept is accepted."""
    cut = "tests/test_cut.py::test_cut[a"
    odd = replace(
        official,
        instance_id="calc__official-cut",
        test_patch=official.test_patch + CUT,
        grader=replace(official.grader, command=official.grader.command + " tests/test_cut.py"),
        PASS_TO_PASS=(*official.PASS_TO_PASS, cut),
    )
    found = validate(odd, images(odd))
    assert found.valid, found
    assert f"1 PASS_TO_PASS tests do not pass without a patch: {cut}" in found.notes


def test_a_test_that_only_the_log_calls_passed_is_not_believed(official: Task, image: Image) -> None:
    graded = grade(official, image, FAKE.encode())
    assert graded.resolved is False
    assert graded.reason == "log_mismatch", graded
    assert "the runner's own report does not" in graded.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parser", "printed"), [("parse_log_seaborn", "'PASSED'"), ("parse_log_requests", "'PASSED ' + '[' * 1000000")]
)
def test_a_log_that_the_benchmarks_parser_cannot_read_is_no_failure_of_ours(
    official: Task, image: Image, monkeypatch: pytest.MonkeyPatch, parser: str, printed: str
) -> None:
    monkeypatch.setattr(harness, "PARSE_TIMEOUT", 10.0)
    grader = LogGrader(official.grader.command, f"swebench:{parser}", reporter="pytest", timeout=1800.0)
    task = replace(official, grader=grader)
    graded = grade(task, image, FAKE.replace('"PASSED tests/test_double.py::test_triple\\n"', printed).encode())
    assert (graded.verdict, graded.reason) == (Verdict.FAILED, "log_unreadable"), graded


@pytest.mark.slow
def test_ids_that_only_an_inner_pytest_prints_are_the_logs(official: Task, images: Callable[[Task], Image]) -> None:
    """As in the rows of pytest itself: no file of the repository has them."""
    inner = replace(
        official,
        instance_id="calc__official-2",
        PASS_TO_PASS=(*official.PASS_TO_PASS, "test_inner.py::test_it"),
        grader=replace(official.grader, command=f"echo PASSED test_inner.py::test_it; {official.grader.command}"),
    )
    assert grade_reference(inner, images(inner)).verdict is Verdict.RESOLVED


def test_a_file_that_the_tests_patch_removes_is_removed(official: Task, images: Callable[[Task], Image]) -> None:
    removal = (
        "diff --git a/tests/helper.py b/tests/helper.py\ndeleted file mode 100644\n"
        "--- a/tests/helper.py\n+++ /dev/null\n"
        "@@ -1,2 +0,0 @@\n-def same(a, b):\n-    return a == b\n"
    )
    task = replace(
        official,
        instance_id="calc__official-3",
        test_patch=official.test_patch + removal,
        grader=replace(official.grader, command=f"test ! -e tests/helper.py && {official.grader.command}"),
    )
    assert grade_reference(task, images(task)).verdict is Verdict.RESOLVED


@pytest.mark.slow
def test_ids_that_pytest_prints_from_another_root_are_its_own(official: Task, images: Callable[[Task], Image]) -> None:
    """As pytest before 9 prints them with ``-c /dev/null``: its root is /dev then, and its ids start there."""
    printed = f"{official.grader.command} \"$@\" 2>&1 | sed 's,^PASSED ,PASSED ../dev/,'"
    from_dev = f"set -o pipefail; from_dev() {{ {printed}; }}; from_dev"
    task = replace(
        official,
        instance_id="calc__official-4",
        FAIL_TO_PASS=tuple(f"../dev/{test}" for test in official.FAIL_TO_PASS),
        PASS_TO_PASS=tuple(f"../dev/{test}" for test in official.PASS_TO_PASS),
        grader=replace(official.grader, command=from_dev),
    )
    image = images(task)
    assert grade(task, image, UNHELPFUL.encode()).reason == "tests_not_passed"
    graded = grade(task, image, task.patch.encode())
    assert (graded.verdict, graded.flags) == (Verdict.RESOLVED, ())


def test_a_reference_may_change_a_file_with_tests_in_docstrings(
    official: Task, images: Callable[[Task], Image]
) -> None:
    documented = official.patch.replace("+6,6 @@", "+6,10 @@")
    documented = documented.replace(
        "+def triple(a):\n", '+def triple(a):\n+    """\n+    >>> triple(2)\n+    6\n+    """\n'
    )
    task = replace(
        official,
        instance_id="calc__official-5",
        patch=documented,
        FAIL_TO_PASS=("calc/core.py::calc.core.triple", *official.FAIL_TO_PASS),
        grader=replace(official.grader, command=f"{official.grader.command} --doctest-modules calc/core.py"),
    )
    image = images(task)
    reference = grade_reference(task, image)
    assert reference.verdict is Verdict.RESOLVED, reference
    assert grade(task, image, task.patch.encode()).verdict is Verdict.RESOLVED
