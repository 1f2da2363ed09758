"""A few things at once: all of them, in the order in which they end, and none that nobody will look at."""

from __future__ import annotations

import threading

import pytest

from minisandbox import errors
from minisandbox.pool import as_finished


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
