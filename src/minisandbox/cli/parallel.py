"""A few things at once, given up at once by Ctrl-C."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

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
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, Result] | BaseException] = queue.SimpleQueue()
    for number in range(len(todo)):
        waiting.put(number)

    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                ended.put((number, function(todo[number])))
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread, which raises it
                ended.put(error)
                return

    for number in range(min(workers, len(todo))):
        threading.Thread(target=serve, name=f"worker-{number}", daemon=True).start()
    results: dict[int, Result] = {}
    try:
        while len(results) < len(todo):
            news = ended.get()
            if isinstance(news, BaseException):
                raise news
            results[news[0]] = news[1]
    finally:
        stop.set()  # what nobody will look at is not begun
    return [results[number] for number in range(len(todo))]
