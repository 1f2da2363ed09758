"""Cancel work that runs in threads, by stopping its sandboxes so that pending calls return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError

if TYPE_CHECKING:
    from minisandbox.sandbox._sync.sandbox import Sandbox


class CancelledError(Exception):
    """The work was cancelled, and its results are meaningless. The code that called ``cancel`` catches this."""


class Cancellation:
    """The running sandboxes of one cancellable piece of work; it may be shared by threads."""

    def __init__(self) -> None:
        self._sandboxes: set[Sandbox] = set()
        self._lock = threading.Lock()
        self._is_cancelled = False

    @contextmanager
    def running(self, sandbox: Sandbox) -> Iterator[None]:
        """Stop a sandbox if the work is cancelled while the body runs.

        Args:
            sandbox: the sandbox. If the work is not cancelled, the caller stops it.

        Raises:
            CancelledError: the work was cancelled, before or while the body ran. It is raised even if the body has
                completed, because a command that a cancellation kills returns a result like any other.
        """
        with self._lock:
            self.check()
            self._sandboxes.add(sandbox)
        try:
            yield
            self.check()
        except MiniSandboxError as error:
            if self._is_cancelled:
                raise CancelledError from error
            raise
        finally:
            with self._lock:
                self._sandboxes.discard(sandbox)

    def check(self) -> None:
        """Raise CancelledError if the work was cancelled."""
        if self._is_cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """Cancel the work: stop running sandboxes and refuse new ones. Calling it again does nothing."""
        with self._lock:
            self._is_cancelled = True
            sandboxes = list(self._sandboxes)
        for sandbox in sandboxes:
            with suppress(MiniSandboxError):  # the sandbox hangs; its thread dies with this process
                sandbox.stop()
