"""Grades of equal submissions within one run: made once, also by several threads; failures of ours are made again."""

from __future__ import annotations

import threading

import pytest

from minisandbox.grade import Grade, Reason, Verdict
from minisandbox.rollouts import KnownGrades
from minisandbox.sandbox.cancellation import Cancellation, CancelledError


def graded(reason: Reason) -> Grade:
    return Grade("t", reason.verdict, reason, "")


def test_equal_submissions_are_graded_once_also_at_the_same_time() -> None:
    known, began, go = KnownGrades(), threading.Event(), threading.Event()
    made: list[str] = []

    def make() -> Grade:
        made.append("")
        began.set()
        assert go.wait(30)
        return graded(Reason.RESOLVED)

    found: list[Grade] = []
    threads = [threading.Thread(target=lambda: found.append(known.of("i", "t", b"p", make))) for _ in range(4)]
    threads[0].start()
    assert began.wait(30)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(30)
    assert [one.verdict for one in found] == [Verdict.RESOLVED] * 4
    assert len(made) == 1
    for other in (("j", "t", b"p"), ("i", "u", b"p"), ("i", "t", b"q")):
        known.of(*other, make)
    assert len(made) == 4


def test_waiting_for_another_threads_grade_can_be_called_off() -> None:
    known, began, go, cancellation = KnownGrades(), threading.Event(), threading.Event(), Cancellation()

    def make() -> Grade:
        began.set()
        assert go.wait(30)
        return graded(Reason.RESOLVED)

    first = threading.Thread(target=lambda: known.of("i", "t", b"p", make))
    first.start()
    assert began.wait(30)
    threading.Timer(0.1, cancellation.cancel).start()
    with pytest.raises(CancelledError):
        known.of("i", "t", b"p", make, cancellation)
    go.set()
    first.join(30)


def test_a_failure_of_ours_is_not_kept() -> None:
    known = KnownGrades()
    failed = known.of("i", "t", b"p", lambda: graded(Reason.INFRASTRUCTURE))
    assert failed.resolved is None
    with pytest.raises(OSError, match="disk"):
        known.of("i", "t", b"p", lambda: (_ for _ in ()).throw(OSError("disk")))
    assert known.of("i", "t", b"p", lambda: graded(Reason.TESTS_NOT_PASSED)).resolved is False
    assert known.of("i", "t", b"p", lambda: graded(Reason.RESOLVED)).resolved is False
