"""A pytest plugin that records which tests call which functions of the project.

The plugin runs inside a sandbox, under the task's own interpreter. MINISANDBOX_CALLS names the repository's directory
and the output file. The output is JSON: the tests by ``path:line`` of the function's first line. It only selects the
tests to run later, so a wrong output cannot change a verdict.
"""

import json
import os
import sys

import pytest

ROOT, _, OUT = os.environ.get("MINISANDBOX_CALLS", "").partition(":")
tests_by_location = {}
current_test = [""]


def _note(frame, event, _):
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(ROOT + "/"):
        location = "%s:%d" % (path[len(ROOT) + 1 :], frame.f_code.co_firstlineno)
        tests_by_location.setdefault(location, {})[current_test[0]] = None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Record the calls of a test and its fixtures."""
    current_test[0] = item.nodeid
    sys.setprofile(_note)
    yield
    sys.setprofile(None)


def pytest_sessionfinish():
    """Write the recorded calls."""
    with open(OUT, "w") as file:
        json.dump({location: list(tests) for location, tests in tests_by_location.items()}, file)
