"""A few things at once, given up at once by Ctrl-C."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def as_finished(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[tuple[int, Result], None, None]:
    """Call a function for each item, several at once, and hand on what it returned as it comes.

    The threads are daemons: unlike those of concurrent.futures, they do not keep a process that was told to end alive.
    Where the caller stops asking, because of an exception or because it has enough, no further item is begun, and what
    the threads are still at is never handed on.

    Args:
        function: what to do; its first error ends the iteration.
        items: what to do it with.
        workers: how many at once, at least 1.

    Yields:
        The number of the item and its result, in the order in which they end.

    Raises:
        BaseException: what ``function`` raised.
    """
    todo = list(items)
    crew = _Crew(function, todo)
    for number in range(min(max(workers, 1), len(todo))):
        threading.Thread(target=crew.serve, name=f"worker-{number}", daemon=True).start()
    try:
        for _ in todo:
            yield crew.next()
    finally:
        crew.stop.set()


class _Crew(Generic[Item, Result]):
    """What the threads of one call share."""

    def __init__(self, function: Callable[[Item], Result], todo: list[Item]) -> None:
        self.stop = threading.Event()
        self._function = function
        self._todo = todo
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, Result] | BaseException] = queue.SimpleQueue()
        for number in range(len(todo)):
            self._waiting.put(number)

    def serve(self) -> None:
        """Take one item after another, on a thread of its own."""
        while not self.stop.is_set():
            try:
                number = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._ended.put((number, self._function(self._todo[number])))
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread, which raises it
                self._ended.put(error)
                return

    def next(self) -> tuple[int, Result]:
        """Wait for the next one that ends."""
        news = self._ended.get()
        if isinstance(news, BaseException):
            raise news
        return news
