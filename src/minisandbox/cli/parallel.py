"""A few things at once, given up at once by Ctrl-C."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> list[Result]:
    """Call a function for each item, several at once.

    The threads are daemons: unlike those of concurrent.futures, they do not keep a process that was told to end alive.

    Args:
        function: what to do; its first error ends the call.
        items: what to do it with.
        workers: how many at once; 1 or less: one after the other, on this thread.

    Returns:
        The results, in the order of the items.

    Raises:
        BaseException: what ``function`` raised.
    """
    todo = list(items)
    if workers <= 1 or len(todo) <= 1:
        return [function(item) for item in todo]
    crew = _Crew(function, todo)
    for number in range(min(workers, len(todo))):
        threading.Thread(target=crew.serve, name=f"worker-{number}", daemon=True).start()
    return crew.results()


class _Crew(Generic[Item, Result]):
    """What the threads of one call share."""

    def __init__(self, function: Callable[[Item], Result], todo: list[Item]) -> None:
        self._function = function
        self._todo = todo
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, Result] | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        for number in range(len(todo)):
            self._waiting.put(number)

    def serve(self) -> None:
        """Take one item after another, on a thread of its own."""
        while not self._stop.is_set():
            try:
                number = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._ended.put((number, self._function(self._todo[number])))
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread, which raises it
                self._ended.put(error)
                return

    def results(self) -> list[Result]:
        """Wait for all of them, or for the first error."""
        found: dict[int, Result] = {}
        try:
            while len(found) < len(self._todo):
                news = self._ended.get()
                if isinstance(news, BaseException):
                    raise news
                found[news[0]] = news[1]
        finally:
            self._stop.set()  # what nobody will look at is not begun
        return [found[number] for number in range(len(self._todo))]
