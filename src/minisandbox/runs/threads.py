"""Run blocking calls in daemon threads, which do not keep an exiting process alive."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, as_completed
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class Threads:
    """Pool of daemon threads that call functions.

    Args:
        count: maximum number of concurrent calls, at least 1.
        name: prefix of the threads' names.
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
        """Number of calls that have not started."""
        return self._calls.qsize()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a function to be called by the next free thread.

        Args:
            function: the function.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.
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
            self._calls.put(call)  # hold the lock, because after close() no thread would take the call
        return future

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread, and await its result.

        If the caller is cancelled, a call that has started continues, and its result is dropped.

        Args:
            function: the function.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.

        Raises:
            BaseException: ``function`` failed with this exception.
        """
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def close(self) -> None:
        """Make the threads exit after all scheduled calls."""
        with self._lock:
            for _ in self._threads:
                self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the threads to exit after :meth:`close`.

        Args:
            timeout: maximum seconds to wait for all threads together.
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
    """Call a function for each item, several at once, and yield the results as the calls finish.

    When the caller stops iterating, no further call starts, and the results of running calls are dropped.

    Args:
        function: the function; its first error ends the iteration.
        items: the items.
        workers: maximum number of concurrent calls, at least 1.

    Yields:
        The index of the item and the result, in the order in which the calls finish.

    Raises:
        BaseException: ``function`` failed with this exception.
    """
    threads, stopped = Threads(workers, "worker"), threading.Event()

    def begin(item: Item) -> T:
        if stopped.is_set():
            raise _StoppedError
        try:
            return function(item)
        except BaseException:  # start no further call, also after Ctrl-C
            stopped.set()
            raise

    try:
        indices = {threads.submit(begin, item): index for index, item in enumerate(items)}
        for call in as_completed(indices):
            if not isinstance(call.exception(), _StoppedError):  # the error that stopped the calls is still to come
                yield indices[call], call.result()
    finally:
        stopped.set()
        threads.close()


class _StoppedError(Exception):
    """The call was not started, because an earlier call failed or the caller has stopped."""
