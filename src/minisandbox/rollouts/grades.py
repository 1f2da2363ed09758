"""Grades that are known: where tests always do the same, equal submissions to a task need one grading."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from minisandbox.grade import Grade


class KnownGrades:
    """The grades of a run, by image, task and submission. Threads that ask for the same one wait for the first.

    A grade without a reward (unconfirmed, a failure of ours) is never kept: a thread that waited for it grades again.
    A copy for another process knows nothing yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, bytes], Future[Grade | None]] = {}

    def __reduce__(self) -> tuple[type[KnownGrades], tuple[()]]:
        """Pickle an empty one: each node of a cluster has its own."""
        return KnownGrades, ()

    def of(self, image: str, task: str, submission: bytes, make: Callable[[], Grade]) -> Grade:
        """Return the grade of a submission, made if it is not known.

        Args:
            image: the key of the task's image.
            task: the task's id.
            submission: the patch.
            make: grades; whatever it raises is raised.
        """
        key = (image, task, submission)
        with self._lock:
            known = self._known.get(key)
            ours = known is None
            if known is None:
                known = self._known[key] = Future()
        if not ours:
            return known.result() or make()
        found = None
        try:
            found = make()
            return found
        finally:
            if found is None or found.resolved is None:
                with self._lock:
                    del self._known[key]
                known.set_result(None)
            else:
                known.set_result(found)
