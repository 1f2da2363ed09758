"""What in an image would give the answer away is found where an agent would find it; an honest image has nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.builds import python_build

from minisandbox.grade import Cause, Status, validate
from minisandbox.grade.leaks import find_leaks
from minisandbox.images import Image
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]


def _with(task: Task, name: str, *commands: str) -> Task:
    build = replace(python_build(task), install=commands)
    return replace(task, instance_id=f"calc__{name}", build=build)


@pytest.mark.slow
def test_an_honest_image_has_nothing(bench: Task, smith: Task, images: Callable[[Task], Image]) -> None:
    for task in (bench, smith):
        assert find_leaks(task, images(task)) == ()


@pytest.mark.slow
def test_a_copy_of_the_hidden_tests_is_found(bench: Task, images: Callable[[Task], Image]) -> None:
    lines = ("def test_triple():", "    from calc import core", "    assert core.triple(2) == 6")
    command = "printf '%s\\n' " + " ".join(f"'{line}'" for line in lines) + " > /root/notes.txt"
    task = _with(bench, "leaked-tests", command)
    [leak] = find_leaks(task, images(task))
    assert (leak.kind, leak.place) == ("tests", "/root/notes.txt")
    assert "tests/test_double.py" in leak.detail


@pytest.mark.slow
def test_a_copy_of_the_unbroken_code_is_found(smith: Task, images: Callable[[Task], Image]) -> None:
    """The bug takes a line out that says something; what was installed beside the repository still has it."""
    bug = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -2,3 +2,3 @@
     return a + b
-    # the sum of two numbers, as everybody knows it
+    # a sum

"""
    known = "sed -i 's/# that is all/# the sum of two numbers, as everybody knows it/' calc/core.py"
    task = replace(_with(smith, "leaked-code", known, "sed 's/^def/ def/' calc/core.py > /opt/older.py"), patch=bug)
    [leak] = find_leaks(task, images(task))
    assert (leak.kind, leak.place) == ("reference", "/opt/older.py")


@pytest.mark.slow
def test_an_archive_of_the_project_is_found(bench: Task, images: Callable[[Task], Image]) -> None:
    task = _with(bench, "leaked-archive", "touch /opt/calc-1.1-py3-none-any.whl /opt/other-1.0-py3-none-any.whl")
    [leak] = find_leaks(task, images(task))
    assert (leak.kind, leak.place) == ("archive", "/opt/calc-1.1-py3-none-any.whl")


@pytest.mark.slow
def test_a_task_whose_image_leaks_is_not_valid(bench: Task, images: Callable[[Task], Image]) -> None:
    task = _with(bench, "leaked-wheel", "touch /opt/calc-1.1-py3-none-any.whl")
    found = validate(task, images(task))
    assert (found.status, found.cause) == (Status.INVALID, Cause.LEAK)
    assert "/opt/calc-1.1-py3-none-any.whl" in found.detail
