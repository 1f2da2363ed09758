"""A few things at once: all of them, in the order in which they end, and none that nobody will look at."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from minisandbox import errors
from minisandbox.runs import Threads, as_finished


@pytest.mark.parametrize("workers", [0, 1, 3, 50])
def test_everything_is_done_once(workers: int) -> None:
    found = list(as_finished(lambda n: n * n, range(20), workers))
    assert sorted(found) == [(n, n * n) for n in range(20)]
    assert list(as_finished(str, [], workers)) == []


def test_several_at_once_and_in_the_order_in_which_they_end() -> None:
    second = threading.Event()

    def work(number: int) -> bool:
        if number:
            second.set()
        return second.wait(600)

    ends = [number for number, ended in as_finished(work, range(2), 2) if ended]
    assert sorted(ends) == [0, 1]


def test_the_first_error_ends_it_without_waiting() -> None:
    release = threading.Event()
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise errors.InvalidValue("zero")
        release.wait(600)

    with pytest.raises(errors.InvalidValue, match="zero"):
        list(as_finished(work, range(4), 2))
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]
    assert workers, "it waited for the others"
    release.set()
    for worker in workers:
        worker.join(60)
    assert {*begun} <= {0, 1}, "what nobody will look at is not begun"


def test_who_stops_asking_gets_nothing_more() -> None:
    release = threading.Event()
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number:
            release.wait(600)
        return number

    working = as_finished(work, range(9), 1)
    assert next(working) == (0, 0)
    working.close()
    release.set()
    for worker in [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]:
        worker.join(60)
    assert {*begun} <= {0, 1}


def test_a_call_is_made_although_the_threads_are_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing between a call's two steps put the threads' end before it, and nobody ever made the call."""
    threads = Threads(1, "test")
    threads.submit(int).result(60)
    put, closing = threads._calls.put, threading.Thread(target=threads.close)

    def close_first(call: object) -> None:
        monkeypatch.undo()
        closing.start()
        closing.join(0.2)  # it waits, where the two steps are one
        put(call)  # type: ignore[arg-type]

    monkeypatch.setattr(threads, "_calls", Calls(threads._calls, close_first))
    assert threads.submit(int, "7").result(60) == 7
    closing.join(60)


class Calls:
    """A queue whose next call is put by a function of ours."""

    def __init__(self, calls: object, put: Callable[[object], None]) -> None:
        self._calls = calls
        self.put = put

    def __getattr__(self, name: str) -> object:
        return getattr(self._calls, name)
