"""Signals wait while a training step changes the weights."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from minisandbox.train.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _python_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_wait_and_are_delivered_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.delay()
        for _ in range(3):
            interrupts.delay()
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.allow()
        interrupts.allow()
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_error_restores_the_handlers_and_is_kept() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def train() -> None:
        with Interrupts() as interrupts:
            interrupts.delay()
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        train()
    assert {number: signal.getsignal(number) for number in before} == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.delay()
            os.kill(os.getpid(), signal.SIGINT)
            interrupts.allow()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_sets_no_handlers() -> None:
    before, handlers = signal.getsignal(signal.SIGINT), []

    def train() -> None:
        with Interrupts() as interrupts:
            interrupts.delay()
            handlers.append(signal.getsignal(signal.SIGINT))
            interrupts.allow()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert handlers == [before]
