"""Translate between the names of tests in runners' output, in the benchmarks' lists, and pytest ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from minisandbox.patches import touched_files
from minisandbox.tasks import Task, file_of, node_id

_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")


def located(task: Task, tests: Iterable[str]) -> Mapping[str, str]:
    """Map the pytest ids of tests to the names that the test runner prints.

    Args:
        task: the task.
        tests: names from the task's lists. Names without a file, e.g. descriptions, are left out. SymPy's names never
            contain a file, so each is mapped from an id in every Python file of the test patch.
    """
    if task.grader.reporter == "pytest":
        return {node_id(test): node_id(test) for test in tests if file_of(test)}
    files = [path for path in touched_files(task.test_patch) if path.endswith(".py")]
    names: dict[str, str] = {}
    for test in tests:
        if match := _UNITTEST.fullmatch(test):
            *module, name = match[2].removesuffix(f".{match[1]}").split(".")
            names[f"tests/{'/'.join(module)}.py::{name}::{match[1]}"] = test
        elif test.isidentifier():
            names |= {f"{path}::{test}": test for path in files}
    return names


def first_words(outcomes: Mapping[str, str]) -> Mapping[str, str]:
    """Add the shorter names that the benchmarks' lists of tests may contain to a mapping of outcomes.

    The benchmarks' parsers cut off pytest's ids at the first space, and unittest prints a description below a name. A
    name with a blank first line has no shorter name.
    """
    first_lines = {test: test.splitlines()[0] for test in outcomes if test}
    lines = {line: outcomes[test] for test, line in first_lines.items() if line.strip()}
    return {**{test.split()[0]: outcome for test, outcome in lines.items()}, **lines, **outcomes}
