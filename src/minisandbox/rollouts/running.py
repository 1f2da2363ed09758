"""Run a batch on its own event loop, and drain the batch on Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.rollouts.batch import DRAIN, Batch
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.summary import Summary
from minisandbox.runs import Config, Progress
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
    companion: Companion | None = None,
    cluster: Cluster | None = None,
) -> tuple[Summary, ...]:
    """Run a :class:`.Batch` on its own event loop, with the same arguments, result and errors.

    On the main thread, the first Ctrl-C drains the batch: no more rollouts start, and running rollouts have ``drain``
    seconds to finish. A second Ctrl-C or SIGTERM stops the batch immediately. Finished rollouts are on disk either way.

    Args:
        tasks: the tasks.
        setup: the agent, its model, and limits.
        out: the run directory.
        image_of: returns a task's image; not used with a cluster, because its nodes build the images.
        images: starts to build the images of many tasks together; replaces ``image_of``.
        attempts: the number of rollouts per task.
        budgets: concurrency limits.
        tries: maximum tries of a rollout; infrastructure errors are retried.
        pause: seconds before the second try.
        jitter: seconds over which the starts of the first rollouts are spread at random.
        drain: seconds that running rollouts have to finish after the batch is drained.
        config: further properties of the run.
        progress: called after each rollout.
        notice: called with messages for the user, for instance when a drain starts.
        companion: a coroutine function that runs on the same event loop until the batch ends, for instance a display.
        cluster: the nodes that run the rollouts; None runs them in this process.

    Returns:
        A summary of each rollout, task by task.

    Raises:
        KeyboardInterrupt: Ctrl-C drained or stopped the batch.
    """
    crew = None if cluster is None else cluster.crew(setup, budgets or Budgets(), tries=tries, pause=pause)
    batch = Batch(
        tasks, setup, out, image_of=image_of, images=images, attempts=attempts, budgets=budgets, tries=tries,
        pause=pause, jitter=jitter, drain=drain, config=config, progress=progress, crew=crew,
    )  # fmt: skip
    signals = Signals(batch, notice or (lambda _: None))
    with signals.restored(), _short_turns():
        try:
            summaries = asyncio.run(_run(batch, signals, setup, companion))
        except asyncio.CancelledError:
            if not signals.number:
                raise
    if signals.number:
        signals.raise_again()
    return summaries


async def _run(batch: Batch, signals: Signals, setup: Setup, companion: Companion | None) -> tuple[Summary, ...]:
    signals.listen()
    running = asyncio.ensure_future(companion(batch)) if companion is not None else None
    try:
        return await batch.run()
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        if setup.model is not None:
            await setup.model.close()


@contextmanager
def _short_turns() -> Iterator[None]:
    """Shorten the interpreter's thread switch interval from 5 ms to 1 ms.

    The event loop releases the interpreter lock at each system call. To get the lock back, it waits one interval for
    each thread that is grading or writing.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Signals:
    """Handle SIGINT and SIGTERM for a batch on the main thread.

    Attributes:
        number: the number of the signal that drained or stopped the batch, or 0.

    Args:
        batch: the batch.
        notice: called with messages for the user.
    """

    def __init__(self, batch: Batch, notice: Callable[[str], None]) -> None:
        self.number = 0
        self._batch = batch
        self._notice = notice

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the previous signal handlers when the block ends, after the event loop has stopped."""
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
        """Install the handlers. Call this on the event loop, in the task that the handlers cancel."""
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
        """Re-raise the signal with its default effect, after the batch has shut down cleanly.

        Raises:
            KeyboardInterrupt: the signal was Ctrl-C, or SIGTERM did not terminate the process.
        """
        if self.number == signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt
