"""What tests are called: by their runner and in the benchmarks' lists, and by the file that they are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from minisandbox.patches import touched_files
from minisandbox.tasks import Task, file_of, node_id

_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")


def located(task: Task, tests: Iterable[str]) -> Mapping[str, str]:
    """Return the ids that pytest would give to tests, each with what the test's runner calls it.

    Args:
        task: the task.
        tests: names from its lists. Those that say nothing of a file, as descriptions do, are left out; SymPy's, which
            never do, are looked for in every file of the tests' patch.
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
    """Return outcomes under the names that lists may have for them, too.

    The benchmarks' parsers cut pytest's ids off at the first space, and unittest prints a description below a name.
    A name whose first line is blank has no other.
    """
    firsts = {test: test.splitlines()[0] for test in outcomes if test}
    lines = {first: outcomes[test] for test, first in firsts.items() if first.strip()}
    return {**{test.split()[0]: outcome for test, outcome in lines.items()}, **lines, **outcomes}
