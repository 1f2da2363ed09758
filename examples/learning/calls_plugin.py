"""A pytest plugin that notes which tests call which functions of the project, by the line that their code begins at.

It runs inside a sandbox, under the task's own interpreter. MINISANDBOX_CALLS names the repository's directory and the
file that the answer is written to, as JSON: the tests of each ``path:line``. The answer chooses what is run later;
nothing is decided by it.
"""

import json
import os
import sys

import pytest

ROOT, _, OUT = os.environ.get("MINISANDBOX_CALLS", "").partition(":")
called = {}
current = [""]


def _note(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(ROOT + "/"):
        called.setdefault("%s:%d" % (name[len(ROOT) + 1 :], frame.f_code.co_firstlineno), {})[current[0]] = None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Note what a test calls, its fixtures included."""
    current[0] = item.nodeid
    sys.setprofile(_note)
    yield
    sys.setprofile(None)


def pytest_sessionfinish():
    """Write what was noted."""
    with open(OUT, "w") as file:
        json.dump({place: list(tests) for place, tests in called.items()}, file)
