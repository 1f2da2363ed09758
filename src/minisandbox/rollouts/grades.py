"""Cache grades, so that equal submissions to a task are graded only once. This assumes deterministic tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

from minisandbox.grade import Grade
from minisandbox.sandbox.cancellation import Cancellation

_LOOK = 0.2
"""Seconds between two checks for cancellation while waiting."""


class KnownGrades:
    """A run's cache of grades, keyed by image, task and submission.

    While one thread grades a submission, other threads with the same submission wait for the grade. Grades without a
    reward (unconfirmed, infrastructure error) are not cached; then each waiting thread grades the submission itself. A
    pickled copy for another process is empty.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, bytes], Future[Grade | None]] = {}

    def __reduce__(self) -> tuple[type[KnownGrades], tuple[()]]:
        """Pickle an empty cache, because each node of a cluster has its own cache."""
        return KnownGrades, ()

    def of(
        self,
        image: str,
        task: str,
        submission: bytes,
        make: Callable[[], Grade],
        cancellation: Cancellation | None = None,
    ) -> Grade:
        """Return a submission's grade, from the cache or by calling ``make``.

        Args:
            image: the key of the task's image.
            task: the task's id.
            submission: the patch.
            make: grades the submission; exceptions that it raises are raised unchanged.
            cancellation: cancels the wait for another thread's grade.

        Raises:
            CancelledError: the wait was cancelled.
        """
        key = (image, task, submission)
        with self._lock:
            future = self._known.get(key)
            is_first = future is None
            if future is None:
                future = self._known[key] = Future()
        if not is_first:
            return _awaited(future, cancellation) or make()
        grade = None
        try:
            grade = make()
            return grade
        finally:
            if grade is None or grade.resolved is None:
                with self._lock:
                    del self._known[key]
                future.set_result(None)
            else:
                future.set_result(grade)


def _awaited(future: Future[Grade | None], cancellation: Cancellation | None) -> Grade | None:
    while True:
        if cancellation is not None:
            cancellation.check()
        with contextlib.suppress(TimeoutError):
            return future.result(_LOOK if cancellation is not None else None)
