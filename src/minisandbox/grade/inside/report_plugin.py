"""A pytest plugin that writes what pytest reports, line by line, to a file of ours.

It runs inside a sandbox, under the task's own interpreter: Python 2.7 to 3.14, pytest 3 to 9, standard library only.
The sandbox has it under a random module name. The variable that holds the nonce and the path of the report is
removed as soon as the plugin is loaded; without it (pytest-xdist's workers, nested runs) the plugin does nothing.

Lines are JSON arrays of ASCII text: [nonce, node id, when, outcome]. ``when`` is setup, call, teardown, subtest or
collect. The first line is [nonce, null, "start", {...}], the last one [nonce, null, "end", {"exit_status", "records"}].
"""

import json
import os
import sys

import pytest

VARIABLE = "MINISANDBOX_REPORT"


def _make_writer(setting):
    """Return a function that appends one line.

    Everything it uses is bound here: tests replace os.write, json.dumps and whole modules (pyfakefs, mock) while
    their reports are being written. The file is opened for each line, so that no descriptor of ours can be closed.
    """
    nonce, path = setting.split(":", 1)
    process = os.getpid()
    getpid, os_open, os_write, os_close = os.getpid, os.open, os.write, os.close
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # never wait for a FIFO put in the file's place
    encode = json.JSONEncoder(ensure_ascii=True).encode
    written = [0]

    def write(node, when, outcome):
        if getpid() != process:  # a fork that a test made, and that goes on as if it were pytest
            return
        if isinstance(node, bytes) and bytes is not str:
            node = node.decode("utf-8", "replace")
        try:
            line = encode([nonce, node, when, outcome])
        except UnicodeDecodeError:  # Python 2 with a node id that is not UTF-8
            line = encode([nonce, node.decode("utf-8", "replace"), when, outcome])
        data = (line + "\n").encode("ascii")
        descriptor = os_open(path, flags, 0o600)
        try:
            while data:
                data = data[os_write(descriptor, data):]
        finally:
            os_close(descriptor)
        written[0] += 1

    return write, written


class Reporter(object):
    """Turns pytest's reports into lines."""

    def __init__(self, setting):
        self._write, self._written = _make_writer(setting)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        versions = {"pytest": pytest.__version__, "python": "%d.%d.%d" % sys.version_info[:3]}
        self._write(None, "start", versions)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self._write(report.nodeid, "collect", report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        self._write(report.nodeid, _when(report), _outcome(report))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
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


def _hide_from_children():
    """Take the plugin's directory out of PYTHONPATH, so that what the tests start does not see it.

    sys.path keeps it: pytest-xdist hands that to its workers, which are told to load the plugin too.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and os.path.abspath(entry) != here]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


_hide_from_children()
_setting = os.environ.pop(VARIABLE, None)


def pytest_configure(config):
    global _setting
    if _setting is not None:
        setting, _setting = _setting, None
        config.pluginmanager.register(Reporter(setting), __name__ + "-reporter")
