"""Delay Ctrl-C and SIGTERM while a training step changes the weights."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handles Ctrl-C and SIGTERM during a training loop. Use it in a ``with`` block.

    Between :meth:`delay` and :meth:`allow`, signals wait, so that an interrupted run has the weights of a whole step.
    The end of the block restores the handlers. In another thread than the main one, which receives no signals, the
    methods do nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, signal._HANDLER] = {}
        self._waiting: list[int] = []

    def delay(self) -> None:
        """Let signals wait; further calls do nothing."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if (handler := signal.getsignal(number)) is not None:  # None if it was not set from Python
                self._handlers[number] = handler
                signal.signal(number, self._receive)

    def allow(self) -> None:
        """Restore the handlers and deliver the signals that waited.

        Raises:
            KeyboardInterrupt: a signal waited, and its handler raises this.
        """
        self._restore()
        waiting, self._waiting = self._waiting, []
        for number in waiting[:1]:
            signal.raise_signal(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._waiting.append(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers; signals that waited are dropped, because an error already ends the block."""
        self._restore()
