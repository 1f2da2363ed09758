"""Names of tests in runners' output, in the benchmarks' lists, and by file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from minisandbox.patches import touched_files
from minisandbox.tasks import Task, file_of, node_id

_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")


def located(task: Task, tests: Iterable[str]) -> Mapping[str, str]:
    """Return pytest ids of tests, each with the name in the runner's output.

    Args:
        task: the task.
        tests: names from its lists. Names without a file, such as descriptions, are left out; SymPy's names, which
            never contain one, are located in every file of the tests' patch.
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
    """Return outcomes, also under the other names that lists may contain.

    The benchmarks' parsers cut pytest's ids off at the first space, and unittest prints a description below a name.
    A name with a blank first line has no other.
    """
    firsts = {test: test.splitlines()[0] for test in outcomes if test}
    lines = {first: outcomes[test] for test, first in firsts.items() if first.strip()}
    return {**{test.split()[0]: outcome for test, outcome in lines.items()}, **lines, **outcomes}
