"""A pytest plugin that sends pytest's reports, line by line, to a reader outside the sandbox.

It runs inside a sandbox, under the task's own interpreter: Python 2.7 to 3.14, pytest 3 to 9, standard library only.
The installed module has a random name; ``report_lines.py``, which writes the lines, is next to it. An environment
variable names the pipes. Without the variable (in pytest-xdist's workers and in nested runs), the plugin does nothing.

A line is [node id, when, outcome]. ``when`` is setup, call, teardown, subtest or collect. If ``when`` is place, the
third value is the line of the test's file at which the test failed; if ``when`` is seconds, it is the duration. The
first line is [null, "start", {...}], the last one is [null, "end", {"exit_status", "records"}]. The line
[null, "collected", {node id: {name: value}}] contains the parameters of tests. If names of functions follow the key,
other tests are collected, but not run.

PYTEST_DONT_REWRITE: this module has no assertions, and is loaded before pytest could rewrite them.
"""

import os
import re
import sys

import pytest

VARIABLE = "MINISANDBOX_REPORT"
_BATCH = 200
_LONGEST_VALUE = 200
_OUTSIDE = re.compile(r"^(?:\.\./)+[^/]+/")


def _spelled(value, spell=ascii if bytes is not str else repr, depth=0):
    """Return a string for a number, string or container of these, the same for equal values; None for other values."""
    value_type = type(value)
    if value is None or value_type in (bool, int, float, complex, str, bytes):
        return spell(value)
    if depth > 9 or value_type not in (list, tuple, set, frozenset, dict):
        return None
    items = [element for pair in value.items() for element in pair] if value_type is dict else list(value)
    spellings = [_spelled(item, spell, depth + 1) for item in items]
    if None in spellings:
        return None
    is_unordered = value_type in (set, frozenset)
    return value_type.__name__ + "(" + ",".join(sorted(spellings) if is_unordered else spellings) + ")"


def _parameters(item):
    """Return a string for each parameter of a test, by name; None for a value that has no string or a long one."""
    callspec = getattr(item, "callspec", None)
    spellings = {}
    for name, value in getattr(callspec, "params", {}).items():
        spelling = None if bytes is str else _spelled(value)
        spellings[name] = spelling if spelling is None or len(spelling) <= _LONGEST_VALUE else None
    return spellings


def _line_of(item, call):
    """Return the innermost line of the test's own file at which it failed, or None."""
    file, line, trace = str(item.fspath), None, call.excinfo.tb
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


class ReportPlugin(object):
    """Sends pytest's reports as lines."""

    def __init__(self, write, line_count, chosen_names):
        self._write, self._line_count, self._chosen_names = write, line_count, chosen_names
        self._items = []

    def _is_chosen(self, item):
        return _OUTSIDE.sub("", item.nodeid.partition("[")[0]) in self._chosen_names

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        versions = {"pytest": pytest.__version__, "python": "%d.%d.%d" % sys.version_info[:3]}
        self._write(None, "start", versions)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        self._items = [item for item in session.items if self._is_chosen(item)]
        items = self._items or session.items
        collected = [(item.nodeid, parameters) for item in items for parameters in [_parameters(item)] if parameters]
        for start in range(0, len(collected), _BATCH):
            self._write(None, "collected", dict(collected[start:start + _BATCH]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Run exactly the chosen tests, even with -x or --maxfail, because tests with changed expectations must fail.

        With pytest-xdist, return None, because its workers run the tests.
        """
        if not self._items or session.config.pluginmanager.hasplugin("dsession"):
            return None
        for item, next_item in zip(self._items, self._items[1:] + [None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        return True

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        if call.excinfo is not None and outcome.get_result().outcome == "failed":
            line = _line_of(item, call)
            if line is not None:
                self._write(item.nodeid, "place", str(line))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self._write(report.nodeid, "collect", report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if report.when == "call" and getattr(report, "duration", 0) > 0.05:
            self._write(report.nodeid, "seconds", "%.2f" % report.duration)
        self._write(report.nodeid, _when(report), _outcome(report))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        yield
        status = getattr(session, "exitstatus", exitstatus)  # other plugins may have changed the status
        self._write(None, "end", {"exit_status": int(status), "records": self._line_count[0]})


def _outcome(report):
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.outcome == "passed" else "xfailed"
    return report.outcome


def _when(report):
    if type(report).__name__.lower() == "subtestreport":  # pytest-subtests and pytest 9, with the test's node id
        return "subtest"
    return report.when if report.when in ("setup", "call", "teardown") else "call"  # xdist reports "???" after a crash


_lines = __import__(__name__ + "_lines")
_lines.hide_from_children()
_setting = os.environ.pop(VARIABLE, None)
_writer = None if _setting is None else _lines.make_writer(_setting)


def pytest_configure(config):
    global _writer
    if _writer is not None:
        reporter, _writer = ReportPlugin(*_writer), None
        config.pluginmanager.register(reporter, __name__ + "-reporter")
