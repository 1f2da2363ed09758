"""A batch from beginning to end, for programs without an event loop: it minds the signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.rollouts.batch import DRAIN, Batch
from minisandbox.rollouts.budgets import Budgets, Progress
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.rundir import Config
from minisandbox.rollouts.setup import Setup
from minisandbox.rollouts.summary import Summary
from minisandbox.tasks import Task

if TYPE_CHECKING:
    from minisandbox.images import Image

Beside = Callable[[Batch], Awaitable[None]]


def run_batch(
    tasks: Iterable[Task],
    setup: Setup,
    out: Path,
    *,
    image_of: Callable[[Task], Image] | None = None,
    attempts: int = 1,
    budgets: Budgets | None = None,
    tries: int = 3,
    pause: float = 1.0,
    jitter: float = 0.0,
    drain: float = DRAIN,
    config: Config | None = None,
    progress: Callable[[Progress], None] | None = None,
    notice: Callable[[str], None] | None = None,
    beside: Beside | None = None,
    cluster: Cluster | None = None,
) -> tuple[Summary, ...]:
    """Run a :class:`.Batch` on an event loop of its own; arguments, result and errors are its.

    On the main thread Ctrl-C once drains: no more rollouts begin, and those under way have ``drain`` seconds to end.
    Ctrl-C twice, or SIGTERM, ends at once. What is finished is on disk either way.

    Args:
        tasks: the tasks.
        setup: who works, with what model, within which bounds.
        out: the run directory.
        image_of: returns a task's image; not used with a cluster, whose nodes build what they need.
        attempts: rollouts per task.
        budgets: how many of each go on at once.
        tries: how often a rollout is tried at most, where it fails on our side.
        pause: seconds before the second try.
        jitter: seconds over which the first rollouts begin.
        drain: seconds that rollouts under way have to end.
        config: what else describes the run.
        progress: called for each rollout.
        notice: called with what people should know: that it drains.
        beside: what runs on the same event loop, and is cancelled when the batch is over: a display, for example.
        cluster: the nodes that do the rollouts; this process if None.

    Returns:
        A summary of each rollout, task by task.

    Raises:
        KeyboardInterrupt: it was drained, or ended, by Ctrl-C.
    """
    crew = None if cluster is None else cluster.crew(setup, budgets or Budgets(), tries=tries, pause=pause)
    batch = Batch(
        tasks, setup, out, image_of=image_of, attempts=attempts, budgets=budgets, tries=tries, pause=pause,
        jitter=jitter, drain=drain, config=config, progress=progress, crew=crew,
    )  # fmt: skip
    signals = Signals(batch, notice or (lambda _: None))
    with signals.restored(), _short_turns():
        try:
            found = asyncio.run(_run(batch, signals, setup, beside))
        except asyncio.CancelledError:
            if not signals.number:
                raise
    if signals.number:
        signals.raise_again()
    return found


async def _run(batch: Batch, signals: Signals, setup: Setup, beside: Beside | None) -> tuple[Summary, ...]:
    signals.listen()
    companion = asyncio.ensure_future(beside(batch)) if beside is not None else None
    try:
        return await batch.run()
    finally:
        if companion is not None:
            companion.cancel()
            await asyncio.wait([companion])
        if setup.model is not None:
            await setup.model.close()


@contextmanager
def _short_turns() -> Iterator[None]:
    """Let threads have the interpreter for 1 ms each instead of 5.

    The event loop gives it away with each system call, and waits its turn behind all threads that grade or write.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Signals:
    """What SIGINT and SIGTERM do to a batch that runs on the main thread.

    Attributes:
        number: the signal that ends it, or 0.

    Args:
        batch: the batch.
        notice: called with what people should know.
    """

    def __init__(self, batch: Batch, notice: Callable[[str], None]) -> None:
        self.number = 0
        self._batch = batch
        self._notice = notice

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back what was there before, when the event loop is over."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def listen(self) -> None:
        """Take the signals; called on the event loop, by the task that is to be cancelled."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            self.number = self.number or number
            task.cancel()

        def interrupt() -> None:
            if self.number:
                stop(signal.SIGINT)
                return
            self.number = signal.SIGINT
            self._batch.drain()
            stages = self._batch.stages
            under_way = sum(stages[stage] for stage in ("sandbox", "agent", "grade"))
            self._notice(
                f"no more rollouts begin; {under_way} under way have {self._batch.patience:g} s to end; "
                "Ctrl-C again stops at once"
            )

        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGTERM, stop, signal.SIGTERM)

    def raise_again(self) -> None:
        """Do what the signal would have done without us; the batch has ended in good order.

        Raises:
            KeyboardInterrupt: for Ctrl-C, and where nothing else comes of it.
        """
        if self.number == signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt
