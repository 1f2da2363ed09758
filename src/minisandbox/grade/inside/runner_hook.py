"""A ``sitecustomize`` that sends the reports of unittest's and SymPy's runners, line by line, to a reader outside.

It runs inside a sandbox, under the task's own interpreter: Python 3.4 to 3.14, standard library only. An environment
variable names the pipes (see ``report_lines.py``) and the program that runs the tests. If the test command starts
Python for another program, the hook does nothing. It imports no module before the program does.

A line is [name, "call", outcome]; for a failed subtest, [name, "subtest", "failed"]. The line [name, "place", line]
precedes a failure. Tests have the names that the runner prints. If names of tests follow the key, only these tests run.
The last line is written when the outermost runner finishes; runners that tests create write nothing.
"""

import importlib.util
import os
import sys
import time

VARIABLE = "MINISANDBOX_REPORT"


def _watch_unittest_results(module, channel):
    """Wrap the methods of unittest.result.TestResult, to which all result classes pass the outcomes of tests."""
    outcomes = {
        "addSuccess": "passed", "addFailure": "failed", "addError": "failed", "addSkip": "skipped",
        "addExpectedFailure": "xfailed", "addUnexpectedSuccess": "failed",
    }  # fmt: skip

    def wrap(name, outcome):
        original = getattr(module.TestResult, name)

        def method(self, test, *arguments):
            if self is channel.result:
                if outcome == "failed" and arguments:
                    channel.report_place(_described(self, test), _file_of(test), arguments[0])
                channel.report(_described(self, test), "call", outcome)
            return original(self, test, *arguments)

        method.__name__, method.__doc__ = name, original.__doc__
        setattr(module.TestResult, name, method)

    for name, outcome in outcomes.items():
        wrap(name, outcome)
    add_subtest, start_test = module.TestResult.addSubTest, module.TestResult.startTest

    def startTest(self, test):
        if self is channel.result:
            channel.start_clock()
        return start_test(self, test)

    module.TestResult.startTest = startTest

    def addSubTest(self, test, subtest, err):
        if self is channel.result and err is not None:
            channel.report(_described(self, test), "subtest", "failed")
        return add_subtest(self, test, subtest, err)

    module.TestResult.addSubTest = addSubTest


def _file_of(test):
    module = sys.modules.get(type(test).__module__)
    return getattr(module, "__file__", None)


def _described(result, test):
    describe = getattr(result, "getDescription", str)
    return describe(test)


def _watch_unittest_runner(module, channel):
    """Wrap the methods of unittest.runner.TextTestRunner; only the outermost run is reported."""
    runner = module.TextTestRunner
    run, make_result = runner.run, runner._makeResult

    def _makeResult(self):
        result = make_result(self)
        if channel.result is None:
            channel.result = result
            channel.start("unittest")
        return result

    def _run(self, test):
        is_outermost = channel.result is None
        if is_outermost and channel.chosen_names:
            _keep_chosen(test, channel.chosen_names)
        result = run(self, test)
        if is_outermost and result is channel.result:
            channel.end(0 if result.wasSuccessful() else 1)
        return result

    runner.run, runner._makeResult = _run, _makeResult


def _keep_chosen(suite, chosen_names):
    """Remove the tests that were not chosen from a test suite."""
    for test in list(suite):
        if hasattr(test, "_tests"):
            _keep_chosen(test, chosen_names)
        elif not chosen_names.intersection(_names_of(test)):
            suite._tests.remove(test)


def _names_of(test):
    """Return a test's names in runners' output, with and without its method, and the first line of its description."""
    name, description = str(test), getattr(test, "shortDescription", lambda: None)()
    return name, name.replace(".%s)" % getattr(test, "_testMethodName", ""), ")"), description


def _watch_sympy(module, channel):
    """Wrap the reporter's methods in sympy.testing.runtests (before SymPy 1.6, in sympy.utilities.runtests)."""
    reporter = module.PyTestReporter
    outcomes = {
        "test_pass": "passed", "test_fail": "failed", "test_exception": "failed", "test_skip": "skipped",
        "test_xfail": "xfailed", "test_xpass": "xpassed",
    }  # fmt: skip

    def wrap(name, outcome):
        original = getattr(reporter, name)

        def method(self, *arguments):
            if self is channel.result:
                if outcome == "failed":
                    channel.report_place(self._active_f.__name__, self._active_f.__code__.co_filename, arguments[0])
                channel.report(self._active_f.__name__, "call", outcome)
            return original(self, *arguments)

        method.__name__ = name
        setattr(reporter, name, method)

    for name, outcome in outcomes.items():
        wrap(name, outcome)
    entering_test = reporter.entering_test

    def _entering_test(self, function):
        if self is channel.result:
            channel.start_clock()
        return entering_test(self, function)

    reporter.entering_test = _entering_test
    matches = module.SymPyTests.matches

    def _matches(self, function):
        return matches(self, function) and (not channel.chosen_names or function.__name__ in channel.chosen_names)

    module.SymPyTests.matches = _matches
    start, finish, import_error = reporter.start, reporter.finish, reporter.import_error

    def _start(self, *arguments, **options):
        if channel.result is None:
            channel.result = self
            channel.start("sympy")
        return start(self, *arguments, **options)

    def _import_error(self, filename, *arguments):
        if self is channel.result:
            channel.report(filename, "collect", "failed")
        return import_error(self, filename, *arguments)

    def _finish(self):
        is_success = finish(self)
        if self is channel.result:
            channel.end(0 if is_success else 1)
        return is_success

    reporter.start, reporter.finish, reporter.import_error = _start, _finish, _import_error


class _Channel(object):
    """Writes the lines; ``result`` is the result object or reporter of the outermost run."""

    def __init__(self, write, line_count, chosen_names):
        self._write, self._line_count, self.chosen_names = write, line_count, chosen_names
        self.result = None
        self._clock, self._started = time.monotonic, time.monotonic()

    def start(self, kind):
        self._write(None, "start", {"pytest": kind, "python": "%d.%d.%d" % sys.version_info[:3]})

    def start_clock(self):
        self._started = self._clock()

    def report(self, name, when, outcome):
        duration = self._clock() - self._started
        if when == "call" and duration > 0.05:
            self._write(name, "seconds", "%.2f" % duration)
        self._write(name, when, outcome)

    def report_place(self, name, file, exc_info):
        """Report the innermost line of the test's own file at which it failed."""
        trace, line = exc_info[2] if isinstance(exc_info, tuple) else None, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == file:
                line = trace.tb_lineno
            trace = trace.tb_next
        if line is not None:
            self.report(name, "place", str(line))

    def end(self, status):
        self._write(None, "end", {"exit_status": status, "records": self._line_count[0]})


class _Finder(object):
    """Finds modules as usual, and wraps the test runners' classes once their modules are loaded."""

    def __init__(self, channel):
        self._channel = channel
        self._watchers = {
            "unittest.result": _watch_unittest_results,
            "unittest.runner": _watch_unittest_runner,
            "sympy.testing.runtests": _watch_sympy,
            "sympy.utilities.runtests": _watch_sympy,
        }

    def find_spec(self, name, path=None, target=None):
        watcher = self._watchers.pop(name, None)
        if watcher is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if name != "sympy.utilities.runtests" or module.__dict__.get("PyTestReporter") is not None:
                watcher(module, self._channel)

        spec.loader.exec_module = exec_module
        return spec


def _install():
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    pipes, _, program = setting.partition("=")
    with open("/proc/self/cmdline", "rb") as source:
        arguments = source.read().decode("utf-8", "replace").split("\0")
    if not any(os.path.basename(word) == program for word in arguments[1:]):
        return
    del os.environ[VARIABLE]
    lines = __import__(__name__ + "_lines")
    lines.hide_from_children()
    sys.meta_path.insert(0, _Finder(_Channel(*lines.make_writer(pipes))))


_install()
