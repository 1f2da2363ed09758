"""Cancel work in threads: its sandboxes are stopped, and so the calls that wait for them return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox._sync.sandbox import Sandbox


class CancelledError(Exception):
    """The work was called off: results since then mean nothing. The caller of ``cancel`` catches it."""


class Cancellation:
    """Sandboxes of one piece of work that may be called off; several threads may have some of them at once."""

    def __init__(self) -> None:
        self._boxes: set[Sandbox] = set()
        self._lock = threading.Lock()
        self._cancelled = False

    @contextmanager
    def running(self, box: Sandbox) -> Iterator[None]:
        """Have a sandbox ended when the work is called off while the body runs.

        Args:
            box: the sandbox; left to the caller to stop.

        Raises:
            CancelledError: it was called off, before or meanwhile. A command that was killed by that has a result like
                any other, so that the body's end proves nothing.
        """
        with self._lock:
            self.check()
            self._boxes.add(box)
        try:
            yield
            self.check()
        except MiniSandboxError as error:
            if self._cancelled:
                raise CancelledError from error
            raise
        finally:
            with self._lock:
                self._boxes.discard(box)

    def check(self) -> None:
        """Raise CancelledError if the work was called off."""
        if self._cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """Call the work off: what runs is ended, nothing further begins. Calling it again does nothing."""
        with self._lock:
            self._cancelled = True
            boxes = list(self._boxes)
        for box in boxes:
            with suppress(MiniSandboxError):  # the thread hangs, and dies with this process
                box.stop()
