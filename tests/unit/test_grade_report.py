"""Reports of the plugin: read, reduced to outcomes, believed or not."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.grade.judging import doubt_about
from minisandbox.grade.report import Report, not_passed
from minisandbox.grade.verdict import Reason
from minisandbox.types import ExecResult, Outcome

KEY = b"k0"
Line = list[object]
START: Line = [None, "start", {"python": "3.11.7", "pytest": "8.4.2"}]


def end(status: int, records: int) -> Line:
    return [None, "end", {"exit_status": status, "records": records}]


def phases(test: str, call: str | None = "passed", setup: str = "passed", teardown: str = "passed") -> list[Line]:
    words = {"setup": setup, "call": call, "teardown": teardown}
    return [[test, when, outcome] for when, outcome in words.items() if outcome is not None]


def text(*lines: Line | bytes) -> bytes:
    """Lines as the plugin writes them; the hash of bytes is right too."""
    state, written = KEY, b""
    for line in lines:
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        written += hashlib.sha256(b"line" + state + data).hexdigest().encode() + b" " + data + b"\n"
        state = hashlib.sha256(b"next" + state + data).digest()
    return written


def whole(status: int, *bodies: list[Line]) -> Report:
    """A report that the plugin could have written."""
    lines = [START, *(line for body in bodies for line in body)]
    return Report.parse(text(*lines, end(status, len(lines))), KEY)


def exited(code: int) -> ExecResult:
    return ExecResult("pytest", Outcome.EXITED, code, None, b"", b"")


def test_a_whole_report() -> None:
    report = whole(1, phases("a.py::test_1"), phases("a.py::test_2", "failed"))
    assert report.damage is None
    assert report.started
    assert report.versions == "Python 3.11.7, pytest 8.4.2"
    assert report.outcomes() == {"a.py::test_1": "passed", "a.py::test_2": "failed"}
    assert report.failures == ("a.py::test_2",)
    assert doubt_about(exited(1), report) is None


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (phases("t"), "passed"),
        (phases("t", "failed"), "failed"),
        (phases("t", None, setup="failed"), "error"),
        (phases("t", teardown="failed"), "error"),
        (phases("t", "skipped"), "skipped"),
        (phases("t", None, setup="skipped"), "skipped"),
        (phases("t", "xfailed"), "xfailed"),
        (phases("t", "xpassed"), "xpassed"),
        (phases("t", None), "incomplete"),
        (phases("t", "odd word of a plugin"), "odd word of a plugin"),
        (phases("t") + phases("t"), "passed"),
        (phases("t") + phases("t", "failed"), "conflicting"),
        (phases("t", "rerun") + phases("t"), "passed"),
        ([["t", "subtest", "passed"], ["t", "subtest", "failed"], *phases("t")], "failed"),
        ([["t", "subtest", "passed"], ["t", "subtest", "skipped"], *phases("t")], "passed"),
    ],
)
def test_phases_become_one_word(body: list[Line], outcome: str) -> None:
    assert whole(0, body).outcomes() == {"t": outcome}


def test_collection_is_not_a_test() -> None:
    report = whole(1, [["a.py", "collect", "failed"], ["b.py", "collect", "skipped"]], phases("c.py::t"))
    assert report.uncollected == ("a.py",)
    assert report.outcomes() == {"c.py::t": "passed"}
    assert doubt_about(exited(1), report) is None, "a file that cannot be collected is a failure that was reported"


def test_only_exact_ids_that_passed_have_passed() -> None:
    outcomes = {"a::t[1]": "passed", "a::u": "skipped", "a::x": "xfailed"}
    assert not_passed(outcomes, ["a::t[1]", "a::t", "a::u", "a::x", "b"]) == ("a::t", "a::u", "a::x", "b")


@pytest.mark.parametrize(
    "data",
    [
        text(START) + b"PASSED a.py::t\n",
        text(START, ["forged", "a.py::t", "call", "passed"]),
        text(START, ["a.py::t", "dance", "passed"]),
        text(START, [3, "call", "passed"]),
        text(START, ["t", "call", ["passed"]]),
        text(["t", "call", "passed"]),
        text(START, START),
        text(START, end(0, 1), ["t", "call", "passed"]),
        text(START, [None, "end", {"exit_status": "0", "records": 1}]),
        text(START, end(0, 7)),
        text(START, *phases("t"), end(0, 1)),
        text(START, b"[" * 100_000),
        text(START, b"\xff\xfe"),
        text(START) + b"[1]\n",
        text(START) + text(START),
        text(START, *phases("t")).replace(b"passed", b"failed"),
        text(START, *phases("t"), end(0, 4)).replace(text(START, *phases("t"))[len(text(START)) :], b""),
        text({"a": 1}),  # type: ignore[arg-type]
    ],
)
def test_what_the_plugin_did_not_write_is_damage(data: bytes) -> None:
    report = Report.parse(data, KEY)
    assert report.damage
    doubt = doubt_about(exited(0), report)
    assert doubt is not None
    assert doubt.reason is Reason.REPORT_DAMAGED


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    report = Report.parse(text(START) + data, KEY)
    assert report.end is None
    assert not report.outcomes()


def fate(outcome: Outcome, signal: int | None = None) -> ExecResult:
    return ExecResult("pytest", outcome, None, signal, b"", b"", duration=3.0)


@pytest.mark.parametrize(
    ("result", "report", "reason"),
    [
        (fate(Outcome.TIMEOUT, 9), whole(0, phases("t")), Reason.TIMEOUT),
        (fate(Outcome.SIGNALED, 11), whole(0, phases("t")), Reason.KILLED),
        (exited(137), whole(0, phases("t")), Reason.KILLED),
        (exited(127), Report(), Reason.NOT_STARTED),
        (exited(0), Report(), Reason.NOT_STARTED),
        (exited(4), Report(), Reason.USAGE_ERROR),
        (exited(0), Report.parse(text(START, *phases("t")), KEY), Reason.NO_END),
        (exited(0), whole(1, phases("t", "failed")), Reason.EXIT_FORGED),
        (exited(0), whole(0, phases("t", "failed")), Reason.EXIT_MISMATCH),
        (exited(1), whole(1, phases("t")), Reason.EXIT_MISMATCH),
        (exited(7), whole(7, phases("t", "failed")), Reason.EXIT_MISMATCH),
        (exited(2), whole(2, phases("t")), Reason.INTERRUPTED),
        (exited(3), whole(3, phases("t")), Reason.INTERNAL_ERROR),
        (exited(5), whole(5), Reason.NO_TESTS),
    ],
)
def test_what_is_not_believed(result: ExecResult, report: Report, reason: Reason) -> None:
    doubt = doubt_about(result, report)
    assert doubt is not None
    assert doubt.reason is reason
    assert doubt.detail
