"""The visible test: a copy of one failing test, alone in a file of its own."""

from __future__ import annotations

from examples.learning.mutations import visible_test_of
from examples.learning.visible import isolated, with_visible_test

from minisandbox.patches import touched_files
from minisandbox.tasks import Form, Task

SOURCE = '''"""Tests."""
import pytest

LIMIT = 3


@pytest.fixture
def box():
    return [LIMIT]


def test_first(box):
    assert box


@pytest.mark.parametrize("x", [1, 2])
def test_second(x):
    assert x


class TestBox:
    def helper(self):
        return 1

    def test_a(self):
        assert self.helper()

    @pytest.mark.slow
    def test_b(self):
        assert self.helper()


class Helper:
    value = 1
'''
PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n"


def test_only_the_named_function_stays() -> None:
    text = isolated(SOURCE, ["test_second"])
    assert text is not None
    assert '@pytest.mark.parametrize("x", [1, 2])\ndef test_second(x):' in text
    assert "def box():" in text
    assert "class Helper:" in text
    assert not any(name in text for name in ("test_first", "TestBox", "test_a"))


def test_only_the_named_method_stays() -> None:
    text = isolated(SOURCE, ["TestBox", "test_a"])
    assert text is not None
    assert "def helper(self):" in text
    assert "def test_a(self):" in text
    assert not any(name in text for name in ("test_first", "test_second", "test_b", "pytest.mark.slow"))


def test_tests_that_no_definition_in_the_file_makes() -> None:
    assert isolated(SOURCE, ["TestBox", "test_inherited"]) is None
    assert isolated(SOURCE, ["test_generated"]) is None
    assert isolated(SOURCE, ["TestBox"]) is None
    assert isolated("def test_first(:", ["test_first"]) is None


def test_the_patch_of_the_bug_adds_the_visible_test() -> None:
    tests = ("tests/test_box.py::TestOther::test_inherited", "tests/test_box.py::test_second[1]")
    task = Task("a__b-1", "a/b", "c", "?", PATCH, "", tests, (), form=Form.SWESMITH)
    made = with_visible_test(task, "m.py", "f", SOURCE)
    assert made is not None
    assert set(touched_files(made.patch)) == {"m.py", "tests/test_visible.py"}
    assert visible_test_of(made.problem_statement) == "tests/test_visible.py"
    assert made.hidden_files == ("tests/test_box.py",)
    added = [line[1:] for line in made.patch.removeprefix(PATCH).splitlines()[5:]]
    assert "\n".join(added) + "\n" == isolated(SOURCE, ["test_second"])
    assert with_visible_test(task, "m.py", "f", "") is None
