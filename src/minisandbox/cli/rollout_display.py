"""Display running rollouts on a terminal: progress, speed, rewards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from minisandbox.cli.common.output import Progress as Output
from minisandbox.cli.common.output import human_seconds
from minisandbox.grade import Verdict
from minisandbox.rollouts import Batch, Progress, Summary
from minisandbox.runs import Threads

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_SECONDS = 0.5
_WINDOW = 120.0  # seconds over which to measure the rate


class BackgroundReporter:
    """Reports finished rollouts in a thread, so that a slow reader of the output does not block rollouts.

    Args:
        report: reports one rollout.
    """

    def __init__(self, report: Callable[[Progress[Summary]], None]) -> None:
        self._report = report
        self._threads = Threads(1, "report")
        self._error: BaseException | None = None

    def __call__(self, event: Progress[Summary]) -> None:
        """Queue the report of a rollout.

        Raises:
            BrokenPipeError: an earlier report failed because the output was closed.
        """
        if self._error is not None:
            raise self._error
        self._threads.submit(self._report, event).add_done_callback(self._keep_error)

    def close(self, timeout: float) -> None:
        """Wait until all rollouts are reported.

        Args:
            timeout: maximum seconds to wait.
        """
        self._threads.close()
        self._threads.join(timeout)

    def _keep_error(self, report: Future[None]) -> None:
        self._error = self._error or report.exception()


class Display:
    """Shows the progress of a batch as permanent lines and, on a terminal, as a live panel.

    Args:
        output: the output to write to.
        agent: the agent's name.
        quiet: whether to show nothing.
        remaining_builds: returns a description of the remaining image builds, or an empty string.
    """

    def __init__(self, output: Output, agent: str, *, quiet: bool, remaining_builds: Callable[[], str] = str) -> None:
        self._output = output
        self._remaining_builds = remaining_builds
        self._agent = agent
        self._quiet = quiet
        self._ends: deque[float] = deque()
        self._rewards: list[float] = []
        self._failures: Counter[str] = Counter()
        self._began = time.monotonic()

    def record(self, event: Progress[Summary]) -> None:
        """Count a finished rollout, and print a line for it unless quiet."""
        latest = event.latest
        if latest.reward is not None:
            self._rewards.append(latest.reward)
        if latest.verdict is Verdict.UNCONFIRMED:
            self._failures[str(latest.verdict)] += 1
        if latest.failed_in:
            self._failures[f"{latest.failed_in}: {latest.reason}"] += 1
        if latest.resumed:
            return
        self._ends.append(time.monotonic())
        if not self._quiet:
            verdict = latest.verdict or f"not graded: {self._output.repeats.once(latest.instance_id, latest.detail)}"
            name = latest.instance_id + (f" #{latest.attempt}" if latest.attempt else "")
            self._output.note(f"{event.done}/{event.total} {self._agent} {name}: {verdict}")

    async def follow(self, batch: Batch) -> None:
        """Show the live panel of a batch until cancelled."""
        if self._quiet or not self._output.terminal:
            return
        from rich.console import Console  # noqa: PLC0415 - only terminals need rich
        from rich.live import Live  # noqa: PLC0415 - only terminals need rich

        console = Console(stderr=True, highlight=False)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            self._output.redirect(lambda line: console.print(line, markup=False, soft_wrap=True))
            try:
                while True:
                    live.update(self.panel(batch), refresh=True)
                    await asyncio.sleep(_REFRESH_SECONDS)
            finally:
                self._output.redirect(None)

    def panel(self, batch: Batch) -> RenderableType:
        """Return the panel's content.

        Args:
            batch: the batch to show.
        """
        from rich.table import Table  # noqa: PLC0415 - only terminals need rich
        from rich.text import Text  # noqa: PLC0415 - only terminals need rich

        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for name, text in self.lines(batch):
            table.add_row(Text(name, style="bold"), Text(text))
        return table

    def lines(self, batch: Batch) -> list[tuple[str, str]]:
        """Return the panel's lines as (name, text).

        Args:
            batch: the batch to show.
        """
        stages = batch.stages
        seconds_left = batch.seconds_left
        rate = self._rate()
        speed = f", {rate:.1f} a minute" if rate else ""
        remaining = ""
        if seconds_left is not None and stages["ended"] < batch.total:
            remaining = f", about {human_seconds(max(seconds_left, 1.0))} left"
        lines = [
            ("rollouts", f"{stages['ended']} of {batch.total}{speed}{remaining}"),
            ("stages", ", ".join(f"{count} {stage}" for stage, count in stages.items() if count)),
        ]
        if remaining_builds := self._remaining_builds():
            lines.append(("images", remaining_builds))
        if self._rewards:
            mean = sum(self._rewards) / len(self._rewards)
            lines.append(("reward", f"{mean:.3f} over {len(self._rewards)}"))
        if self._failures:
            lines.append(("failures", ", ".join(f"{count} x {kind}" for kind, count in self._failures.most_common(4))))
        return lines

    def _rate(self) -> float:
        """Return the number of rollouts per minute over the last two minutes."""
        now = time.monotonic()
        while self._ends and now - self._ends[0] > _WINDOW:
            self._ends.popleft()
        seconds = min(now - self._began, _WINDOW)
        return 60 * len(self._ends) / seconds if seconds > 1 else 0.0
