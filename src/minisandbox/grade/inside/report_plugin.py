"""A pytest plugin that passes on pytest's reports, line by line, to a reader outside the sandbox.

It runs inside a sandbox, under the task's own interpreter: Python 2.7 to 3.14, pytest 3 to 9, standard library only.
The sandbox has it under a random module name, and the module of the lines next to it. A variable says where the lines go.
Without it (pytest-xdist's workers, nested runs) the plugin does nothing.

A line is [node id, when, outcome]. ``when`` is setup, call, teardown, subtest or collect. The first line is
[null, "start", {...}], the last one [null, "end", {"exit_status", "records"}]. [null, "changed", [...]] names functions
of pytest, pluggy and unittest that are no longer what they were when the plugin was loaded.

PYTEST_DONT_REWRITE: it has no assertions, and is loaded before pytest could rewrite them.
"""

import os
import sys
import types

import pytest

try:
    import builtins
except ImportError:  # Python 2
    import __builtin__ as builtins

VARIABLE = "MINISANDBOX_REPORT"
_WATCHED = (
    "_pytest.assertion", "_pytest.assertion.rewrite", "_pytest.assertion.util", "_pytest.main",
    "_pytest.nodes", "_pytest.outcomes", "_pytest.python", "_pytest.python_api", "_pytest.raises", "_pytest.reports",
    "_pytest.runner", "_pytest.skipping", "_pytest.unittest", "pluggy", "pluggy.callers", "pluggy.hooks",
    "pluggy.manager", "pluggy._callers", "pluggy._hooks", "pluggy._manager", "unittest.case",
)  # fmt: skip
_WATCHED_BUILTINS = (
    "AssertionError", "BaseException", "Exception", "all", "any", "compile", "exec", "getattr", "hasattr",
    "isinstance", "issubclass", "len", "repr", "setattr", "type",
)  # fmt: skip
_HOOKS = (
    "pytest_collection_modifyitems", "pytest_itemcollected", "pytest_pycollect_makeitem", "pytest_pyfunc_call",
    "pytest_report_to_serializable", "pytest_runtest_call", "pytest_runtest_logreport", "pytest_runtest_makereport",
    "pytest_runtest_protocol", "pytest_runtestloop", "pytest_sessionfinish",
)  # fmt: skip


def _code_of(value):
    """Return the code of a function, or of the one in a method, a class method or a property."""
    try:
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        return getattr(function, "__code__", None)
    except Exception:  # an object that does as it likes with attributes
        return None


def _functions_of(owner, label):
    for name, value in list(vars(owner).items()):
        if _code_of(value) is not None:
            yield owner, name, value, _code_of(value), label + "." + name


def _watched(own):
    """Yield (owner, name, value, code, label) for all that pytest's verdicts pass through."""
    for name in _WATCHED + (own, own + "_lines"):
        module = sys.modules.get(name)
        if module is None:
            continue
        label = name.replace(own, "plugin")
        for entry in _functions_of(module, label):
            yield entry
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                for entry in _functions_of(value, label + "." + key):
                    yield entry
    for name in _WATCHED_BUILTINS:
        if hasattr(builtins, name):
            yield builtins, name, getattr(builtins, name), None, "builtins." + name


class Watch(object):
    """Compares pytest's own functions with what they were."""

    def __init__(self, own):
        self._entries = list(_watched(own))
        self._told = set()
        self._plugins = None

    def changes(self):
        """Return the labels of what has changed and was not told before."""
        code_of, found = _code_of, []
        for owner, name, value, code, label in self._entries:
            now = owner.__dict__.get(name)
            if (now is not value or (code is not None and code_of(now) is not code)) and label not in self._told:
                self._told.add(label)
                found.append(label)
        return found

    def newcomers(self, manager):
        """Return plugins with a say in results that were registered since the first call; conftest.py files may be."""
        try:
            now = self._hook_plugins(manager)
        except Exception:  # whatever somebody did to the manager is seen elsewhere
            return []
        if self._plugins is None:
            self._plugins = now
            return []
        found = ["plugin " + name for name in sorted(now - self._plugins)]
        self._plugins |= now
        return found

    def _hook_plugins(self, manager):
        names = set()
        for hook in _HOOKS:
            caller = getattr(manager.hook, hook, None)
            for one in caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else ():
                where = getattr(one.plugin, "__file__", None) or ""
                if os.path.basename(where) not in ("conftest.py", "conftest.pyc"):
                    names.add(_name_of(one.plugin))
        return names


def _name_of(plugin):
    if isinstance(plugin, types.ModuleType):
        return plugin.__name__
    kind = type(plugin)
    return "%s.%s" % (kind.__module__, kind.__name__)


class Reporter(object):
    """Turns pytest's reports into lines."""

    def __init__(self, write, written, watch, manager):
        self._write, self._written = write, written
        self._watch, self._manager = watch, manager

    def _tell_changes(self):
        found = self._watch.changes() + self._watch.newcomers(self._manager)
        if found:
            self._write(None, "changed", found[:50])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        versions = {"pytest": pytest.__version__, "python": "%d.%d.%d" % sys.version_info[:3]}
        self._write(None, "start", versions)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        self._tell_changes()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self._write(report.nodeid, "collect", report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self._tell_changes()
        self._write(report.nodeid, _when(report), _outcome(report))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        self._tell_changes()
        yield
        status = getattr(session, "exitstatus", exitstatus)  # other plugins may have changed it
        self._write(None, "end", {"exit_status": int(status), "records": self._written[0]})


def _outcome(report):
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.outcome == "passed" else "xfailed"
    return report.outcome


def _when(report):
    if type(report).__name__.lower() == "subtestreport":  # pytest-subtests, pytest 9: it has the node id of the whole
        return "subtest"
    return report.when if report.when in ("setup", "call", "teardown") else "call"  # xdist: "???" after a crash


_lines = __import__(__name__ + "_lines")
_lines.hide_from_children()
_setting = os.environ.pop(VARIABLE, None)
_writer = None if _setting is None else _lines.make_writer(_setting)
_watch = None if _setting is None else Watch(__name__)


def pytest_configure(config):
    global _writer
    if _writer is not None:
        (write, written), _writer = _writer, None
        manager = config.pluginmanager
        manager.register(Reporter(write, written, _watch, manager), __name__ + "-reporter")
