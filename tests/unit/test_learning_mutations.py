"""Bugs of one word: what is a word, what is a bug, what an edit is, and which part a function belongs to."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
from examples.learning import mutants as mutants_module
from examples.learning.experiment import HELD_OUT, TRAIN
from examples.learning.mutants import Mutating, Survey, clean_task, mutated_tasks
from examples.learning.mutate import write_parts
from examples.learning.mutations import (
    WORDS,
    Function,
    WordEdit,
    apply_edit,
    draw_mutants,
    find_function,
    function_of,
    functions,
    mutants,
    share_of,
    split_words,
    statement,
    view,
    visible_test_of,
)

from minisandbox.errors import DiskFull, GradingError, SandboxCreationError, SandboxGone
from minisandbox.grade import Measurement, Reason
from minisandbox.patches import touched_files
from minisandbox.tasks import Form, Task, TaskSet

SOURCE = '''"""A module."""


def clip(value, low, high):
    """Return `value` if it is > low and not in "max"."""
    # is not seen
    if value is not None and value <  low:  # nor is this: or

        return max(low, 0)
    return min(value, high) if value not in ("in", high) else low


class Box:
    @property
    def size(self):
        return len(self.items) + 1

    @size.setter
    def size(self, value):
        self.items = [0] * value

    def first(self):
        def inner(x):
            return x == 1
        return [x for x in self.items if inner(x)][0]

    def text(self):
        return """
no indentation
""" + "1"
'''


def function(name: str = "clip") -> Function:
    found = find_function(SOURCE, "pkg/m.py", name)
    assert found is not None
    return found


def test_words_are_those_of_code_and_pairs_are_one() -> None:
    line = '    if a is not b and not "x or y" in c:  # or'
    words = split_words(line)
    assert [one.text for one in words] == ["if", "a", "is not", "b", "and not", "in", "c", ":"]
    assert all(line[one.start : one.end].split() == one.text.split() for one in words)
    assert [one.text for one in split_words("x = call(a,")] == ["x", "=", "call", "(", "a", ","]


def test_a_function_is_shown_without_what_is_no_code() -> None:
    assert function().lines == (
        "def clip(value, low, high):",
        "    if value is not None and value <  low:  # nor is this: or",
        "        return max(low, 0)",
        '    return min(value, high) if value not in ("in", high) else low',
    )
    assert function().view.splitlines()[2] == " 3         return max(low, 0)"


def test_a_name_stands_for_one_function_and_what_cannot_be_dedented_is_left_out() -> None:
    assert [one.name for one in functions(SOURCE, "pkg/m.py")] == ["clip", "Box.first"]
    assert find_function(SOURCE, "pkg/m.py", "Box.size") is None
    assert list(functions("def broken(:", "m.py")) == []


def test_every_bug_is_code_and_one_edit_takes_it_out() -> None:
    found = mutants(function())
    assert len(found) > 10
    assert len({one.fix for one in found}) == len(found) == len({one.digest for one in found})
    for one in found:
        assert ast.dump(ast.parse("\n".join(one.lines))) != ast.dump(ast.parse("\n".join(function().lines)))
        assert apply_edit(one.lines, one.fix) == function().lines
        assert WordEdit.parse(one.fix.text) == one.fix
    texts = {one.fix.text for one in found}
    assert {"min -> max 3", "<= -> < 2", "in -> not in 4", "if not -> if 2"} <= texts
    assert not any("None" in text for text in texts)


def test_what_is_no_edit() -> None:
    for text in (
        "submit",
        "< -> <=",
        "< -> <= x",
        "rm -> mv 3",
        "< <= 3",
        "",
        " < -> <= 3",
        "< -> <= 3 ",
        "< -> <= 10000",
    ):
        assert WordEdit.parse(text) is None


def test_a_long_answer_that_is_no_edit_is_read_at_once() -> None:
    """It took a minute, the square of its length, and every rollout waited."""
    assert WordEdit.parse("-> " * 70_000) is None
    assert apply_edit(function().lines, WordEdit(9, "<", ">")) is None
    assert apply_edit(function().lines, WordEdit(1, "<", ">")) is None


def test_the_seed_alone_decides_what_is_drawn() -> None:
    assert draw_mutants(function(), 5, 1) == draw_mutants(function(), 5, 1)
    assert draw_mutants(function(), 5, 1) != draw_mutants(function(), 5, 2)
    assert draw_mutants(function(), 3, 1) == draw_mutants(function(), 9, 1)[:3]
    kinds = [(one.fix.old, one.fix.new) for one in draw_mutants(function(), 99, 1)]
    distinct = len(set(kinds))
    assert len(set(kinds[:distinct])) == distinct, "one exchange of words came twice before another came"


@pytest.mark.parametrize("text", [SOURCE, SOURCE.rstrip("\n"), SOURCE.replace("\n", "\r\n"), f"# \f\n{SOURCE}"])
def test_a_patch_is_the_bug(tmp_path: Path, text: str) -> None:
    (tmp_path / "pkg").mkdir()
    found = find_function(text, "pkg/m.py", "Box.first")
    assert found is not None
    for mutant in mutants(found)[::4]:
        (tmp_path / "pkg" / "m.py").write_bytes(text.encode())
        subprocess.run(["git", "apply", "-"], input=mutant.patch(text).encode(), cwd=tmp_path, check=True)
        now = (tmp_path / "pkg" / "m.py").read_bytes().decode()
        again = find_function(now, "pkg/m.py", "Box.first")
        assert again is not None
        assert again.lines == mutant.lines
        assert again.view == view(mutant.lines) == mutant.view
        assert len(now) == len(text) + len(mutant.fix.old) - len(mutant.fix.new)


def test_a_problem_statement_names_its_function_and_its_visible_test() -> None:
    text = statement("pkg/m.py", "Box.clip", "tests/test_visible.py")
    assert (function_of(text), visible_test_of(text)) == (("pkg/m.py", "Box.clip"), "tests/test_visible.py")
    assert function_of("It does not work.") is None
    assert visible_test_of("`f` in m.py has a bug.") is None


def test_a_function_is_in_one_part_and_the_parts_are_as_large_as_told() -> None:
    shares = [share_of("a/b", "m.py", f"f{number}") for number in range(2000)]
    assert all(0 <= one < 1 for one in shares)
    assert 0.2 < sum(one < 0.25 for one in shares) / 2000 < 0.3
    assert share_of("a/b", "m.py", "f") == share_of("a/b", "m.py", "f") != share_of("a/b", "m.py", "f", 1)


def test_every_word_of_the_grammar_is_one_word_of_code() -> None:
    for word in WORDS:
        assert word in [one.text for one in split_words(f"a {word} b")]


# --- files of tasks --------------------------------------------------------------------------------------------------


def test_a_functions_tasks_are_in_one_file(tmp_path: Path) -> None:
    tasks = [_task(f"f{number}", digest) for number in range(40) for digest in "ab"]
    counts = write_parts(tasks, {"train": 0.5, "held-out": 0.3}, 7, tmp_path / "bugs.jsonl")
    assert set(counts) == {tmp_path / "bugs-train.jsonl", tmp_path / "bugs-held-out.jsonl"}
    parts = [{function_of(task.problem_statement) for task in TaskSet.load(path)} for path in counts]
    assert not parts[0] & parts[1]
    assert [2 * len(part) for part in parts] == list(counts.values())
    assert 0 < len(parts[1]) < len(parts[0]) < 40
    write_parts(tasks, {"": 1.0}, 7, tmp_path / "all.jsonl")
    assert len(TaskSet.load(tmp_path / "all.jsonl")) == 80


def measured(outcome: str, reason: Reason | None = None) -> Measurement:
    return Measurement((("tests/t.py::test_t", outcome),), (), reason, "", 0, 0.0, "", "")


def mutate(
    monkeypatch: pytest.MonkeyPatch,
    buggy: Measurement | Exception,
    told: list[str],
    tests: str = "def test_t(): pass\n",
) -> list[Task]:
    """Make tasks of a module of twelve functions, whose tests do with a bug what is said here."""
    text = "".join(f"def f{n}(a, b):\n    if a < b and a > 0:\n        return a\n    return b\n" for n in range(12))
    calls = {("m.py", 1 + 4 * number): ("tests/t.py::test_t",) for number in range(12)}

    def measure(*_: object, **__: object) -> Measurement:
        if isinstance(buggy, Exception):
            raise buggy
        return buggy

    image: Any = None  # no sandbox is made
    monkeypatch.setattr(
        mutants_module, "survey", lambda *_: Survey({"m.py": text}, {"tests/t.py": tests}, calls, measured("passed"))
    )
    monkeypatch.setattr(mutants_module, "measure", measure)
    return list(mutated_tasks(clean_task(_task("f", "a")), image, Mutating(), report=told.append))


def test_it_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    assert len(mutate(monkeypatch, measured("failed"), told)) == 24
    assert [one.partition(": ")[2] for one in told] == [
        "1 tests, 12 functions to put bugs into", "10 of 12 functions, 20 tasks", "24 tasks of 12 functions",
    ]  # fmt: skip


def test_a_bug_without_a_failing_test_that_can_be_isolated_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutate(monkeypatch, measured("failed"), [], "test_t = make_test()\n") == []


@pytest.mark.parametrize("buggy", [SandboxGone("it has ended"), measured("failed", Reason.TIMEOUT), measured("passed")])
def test_a_bug_that_is_no_task(monkeypatch: pytest.MonkeyPatch, buggy: Measurement | Exception) -> None:
    assert mutate(monkeypatch, buggy, []) == []


@pytest.mark.parametrize(
    ("buggy", "error"),
    [
        (DiskFull("the store is full"), DiskFull),
        (SandboxCreationError("no sandbox"), SandboxCreationError),
        (measured("failed", Reason.RESTORE_FAILED), GradingError),
    ],
)
def test_a_failure_of_ours_is_told(
    monkeypatch: pytest.MonkeyPatch, buggy: Measurement | Exception, error: type[Exception]
) -> None:
    with pytest.raises(error):
        mutate(monkeypatch, buggy, [])


def _task(name: str, digest: str) -> Task:
    patch = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n"
    text = statement("m.py", name, "test_visible.py")
    return Task(f"a__b.{name}__{digest}", "a/b", "c", text, patch, "", ("t.py::t",), (), form=Form.SWESMITH)


def test_the_bundled_sets_share_no_function() -> None:
    train, held_out = TaskSet.load(TRAIN), TaskSet.load(HELD_OUT)
    places = [{(task.repo, function_of(task.problem_statement)) for task in part} for part in (train, held_out)]
    assert not places[0] & places[1]
    assert len(train) > len(held_out) > 10
    for part, low, high in ((train, 0.0, 0.4), (held_out, 0.4, 0.65)):
        for task in part:
            place = function_of(task.problem_statement)
            assert place is not None
            assert low <= share_of(task.repo, *place) < high
            assert task.form is Form.SWESMITH
            assert task.hidden_files == task.test_files, "a task's tests are those of one file, which is hidden"
            visible = visible_test_of(task.problem_statement)
            assert visible is not None
            assert visible not in task.hidden_files
            assert set(touched_files(task.patch)) == {place[0], visible}
    assert len(places[1]) == len(held_out), "held-out tasks are independent: one per function"
