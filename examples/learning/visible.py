"""Give a task a visible test: one failing test of its hidden test file, alone in a new file of the workspace.

The visible test is a copy. The hidden test file stays hidden, and grading runs only hidden tests.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from examples.learning.mutations import statement

from minisandbox.syntax import parse_python
from minisandbox.tasks import Task, file_of

VISIBLE_NAME = "test_visible.py"


def with_visible_test(task: Task, file: str, name: str, test_source: str) -> Task | None:
    """Return a task whose patch also adds a visible test, or None if no failing test can be isolated.

    The visible test is the first FAIL_TO_PASS test that can be isolated. Whether it fails with the bug and passes
    without it has to be checked by running it (:mod:`.check`).

    Args:
        task: a task whose tests are those of one file.
        file: the module of the function with the bug.
        name: the function's name.
        test_source: the text of the test file.
    """
    for test in task.FAIL_TO_PASS:
        path = str(PurePosixPath(file_of(test)).with_name(VISIBLE_NAME))
        text = isolated(test_source, _names(test))
        if text is not None:
            return replace(task, patch=task.patch + _added(path, text), problem_statement=statement(file, name, path))
    return None


def isolated(source: str, names: Sequence[str]) -> str | None:
    """Return a test module with a single test, or None if the module has no such test.

    Imports, helpers and fixtures stay.

    Args:
        source: the module's text.
        names: the test's name, after the names of its classes.
    """
    tree = parse_python(source)
    if tree is None or not names:
        return None
    removed: set[int] = set()
    if not _mark(tree, names, removed):
        return None
    lines = source.split("\n")
    text = "\n".join(line for row, line in enumerate(lines, 1) if row not in removed).strip("\n") + "\n"
    return text if parse_python(text) is not None else None


def _mark(node: ast.Module | ast.ClassDef, names: Sequence[str], removed: set[int]) -> bool:
    """Add the rows of all other tests to ``removed``; return whether the named test exists."""
    is_found = False
    for child in node.body:
        if not _is_test(child):
            continue
        assert isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if child.name != names[0] or isinstance(child, ast.ClassDef) != (len(names) > 1):
            start = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            removed.update(range(start, (child.end_lineno or child.lineno) + 1))
        elif isinstance(child, ast.ClassDef):
            is_found = _mark(child, names[1:], removed)
        else:
            is_found = True
    return is_found


def _is_test(node: ast.stmt) -> bool:
    """Return whether a statement defines a test, or a class that contains tests."""
    if isinstance(node, ast.ClassDef):
        return any(_is_test(child) for child in node.body)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test")


def _names(test: str) -> list[str]:
    """Return the names of a pytest id's classes and function, without its parameters."""
    return test.partition("[")[0].split("::")[1:]


def _added(path: str, text: str) -> str:
    """Return a patch that adds a file."""
    lines = text.removesuffix("\n").split("\n")
    header = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return header + "".join(f"+{line}\n" for line in lines)
