"""Run a whole batch from a program without an event loop, and handle signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.pool import Progress
from minisandbox.rollouts.batch import DRAIN, Batch
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.rundir import Config
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.summary import Summary
from minisandbox.tasks import Task

Companion = Callable[[Batch], Awaitable[None]]


def run_batch(
    tasks: Iterable[Task],
    setup: Setup,
    out: Path,
    *,
    image_of: ImageOf | None = None,
    images: ImagesOf | None = None,
    attempts: int = 1,
    budgets: Budgets | None = None,
    tries: int = 3,
    pause: float = 1.0,
    jitter: float = 0.0,
    drain: float = DRAIN,
    config: Config | None = None,
    progress: Callable[[Progress[Summary]], None] | None = None,
    notice: Callable[[str], None] | None = None,
    beside: Companion | None = None,
    cluster: Cluster | None = None,
) -> tuple[Summary, ...]:
    """Run a :class:`.Batch` on its own event loop, with the same arguments, result and errors.

    On the main thread, the first Ctrl-C drains: no more rollouts start, and running ones have ``drain`` seconds to
    end. A second Ctrl-C or SIGTERM ends at once. Finished rollouts are on disk either way.

    Args:
        tasks: the tasks.
        setup: who works, with what model, within which bounds.
        out: the run directory.
        image_of: returns a task's image; not used with a cluster, whose nodes build their images.
        images: starts to build the images of many tasks together; replaces ``image_of``.
        attempts: rollouts per task.
        budgets: concurrency limits.
        tries: most tries of a rollout, repeated after infrastructure errors.
        pause: seconds before the second try.
        jitter: seconds over which the starts of the first rollouts are spread.
        drain: seconds for running rollouts to end.
        config: further properties of the run.
        progress: called after each rollout.
        notice: called with messages for people, such as the start of a drain.
        beside: a coroutine function run on the same event loop until the batch ends, such as a display.
        cluster: the nodes that run the rollouts; this process if None.

    Returns:
        A summary of each rollout, task by task.

    Raises:
        KeyboardInterrupt: Ctrl-C drained or ended it.
    """
    crew = None if cluster is None else cluster.crew(setup, budgets or Budgets(), tries=tries, pause=pause)
    batch = Batch(
        tasks, setup, out, image_of=image_of, images=images, attempts=attempts, budgets=budgets, tries=tries,
        pause=pause, jitter=jitter, drain=drain, config=config, progress=progress, crew=crew,
    )  # fmt: skip
    signals = Signals(batch, notice or (lambda _: None))
    with signals.restored(), _short_turns():
        try:
            summaries = asyncio.run(_run(batch, signals, setup, beside))
        except asyncio.CancelledError:
            if not signals.number:
                raise
    if signals.number:
        signals.raise_again()
    return summaries


async def _run(batch: Batch, signals: Signals, setup: Setup, beside: Companion | None) -> tuple[Summary, ...]:
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
    """Let threads hold the interpreter for 1 ms instead of 5.

    The event loop yields it at each system call, and then waits for every thread that grades or writes.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Signals:
    """SIGINT and SIGTERM handling for a batch on the main thread.

    Attributes:
        number: the signal that ended the batch, or 0.

    Args:
        batch: the batch.
        notice: called with messages for people.
    """

    def __init__(self, batch: Batch, notice: Callable[[str], None]) -> None:
        self.number = 0
        self._batch = batch
        self._notice = notice

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the earlier handlers after the event loop has ended."""
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
        """Install the handlers; called on the event loop, by the task to cancel."""
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
        """Raise the signal's usual effect, after an orderly end of the batch.

        Raises:
            KeyboardInterrupt: for Ctrl-C, or if SIGTERM did not end the process.
        """
        if self.number == signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt
