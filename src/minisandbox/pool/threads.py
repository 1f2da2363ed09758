"""Daemon threads for blocking calls: they do not keep an exiting process alive."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class Threads:
    """Calls functions in daemon threads of its own, so many at once.

    Args:
        count: how many calls run at once, at least 1.
        name: what the threads are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = max(count, 1)
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many calls have not begun."""
        return self._calls.qsize()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called when a thread is free.

        Args:
            function: what is called.
            args: with what.
            kwargs: the same.
        """
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - handed to the caller that waits for it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            self._open += 1
            future.add_done_callback(self._note_done)
            if len(self._threads) < min(self._count, self._open):
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._calls.put(call)  # with the lock: after close() no thread would take it
        return future

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function and wait for it on the running event loop.

        If this is cancelled, a call that has begun continues, and its result is dropped.

        Args:
            function: what is called.
            args: with what.
            kwargs: the same.

        Raises:
            BaseException: what ``function`` raised.
        """
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def close(self) -> None:
        """Let the threads end when they have made all calls."""
        with self._lock:
            for _ in self._threads:
                self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, after :meth:`close`.

        Args:
            timeout: seconds, for all of them together.
        """
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _note_done(self, _: object) -> None:
        with self._lock:
            self._open -= 1

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def as_finished(
    function: Callable[[Item], T], items: Iterable[Item], workers: int
) -> Generator[tuple[int, T], None, None]:
    """Call a function for each item, several at once, and yield the results as they come.

    When the caller stops iterating, because of an exception or because it has enough, no further item is begun. Results
    of calls that still run are dropped.

    Args:
        function: what to do; its first error ends the iteration.
        items: what to do it with.
        workers: how many at once, at least 1.

    Yields:
        The number of the item and its result, in the order in which they end.

    Raises:
        BaseException: what ``function`` raised.
    """
    threads, stop = Threads(workers, "worker"), threading.Event()
    ended = queue.SimpleQueue[tuple[int, Future[T]]]()

    def begin(item: Item) -> T:
        if stop.is_set():
            raise _StoppedError
        try:
            return function(item)
        except BaseException:  # an interrupt too: the caller gets it, and no further item
            stop.set()
            raise

    def note(number: int, call: Future[T]) -> None:
        ended.put((number, call))

    try:
        calls = [threads.submit(begin, item) for item in items]
        for number, call in enumerate(calls):
            call.add_done_callback(functools.partial(note, number))
        for _ in calls:
            number, call = ended.get()
            if not isinstance(call.exception(), _StoppedError):  # otherwise the error that stopped it is still to come
                yield number, call.result()
    finally:
        stop.set()
        threads.close()


class _StoppedError(Exception):
    """The call was not begun."""
