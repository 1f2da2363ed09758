"""What a terminal shows while rollouts go on: how far they are, how fast, how well."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from minisandbox.cli.output import Progress as Output
from minisandbox.cli.output import human_seconds
from minisandbox.grade import Verdict
from minisandbox.pool import Threads
from minisandbox.rollouts import Batch, Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

_PAUSE = 0.5
_WINDOW = 120.0  # seconds that the rate looks back


class Aside:
    """Tells of rollouts in a thread: whoever reads slowly, or not at all, holds no rollout up.

    Args:
        tell: what tells of one.
    """

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        self._tell = tell
        self._threads = Threads(1, "tell")
        self._error: BaseException | None = None

    def __call__(self, news: Progress) -> None:
        """Tell of a rollout, soon.

        Raises:
            BrokenPipeError: who read before has gone.
        """
        if self._error is not None:
            raise self._error
        self._threads.submit(self._tell, news).add_done_callback(self._look_at)

    def close(self, timeout: float) -> None:
        """Wait until all is told.

        Args:
            timeout: seconds to wait at most.
        """
        self._threads.close()
        self._threads.join(timeout)

    def _look_at(self, told: Future[None]) -> None:
        self._error = self._error or told.exception()


class Display:
    """Tells of a batch: lines that stay, and on a terminal a panel that is drawn anew.

    Args:
        output: where it is told.
        agent: the agent's name.
        quiet: whether nothing is told at all.
        building: says how much is left to build; empty for nothing.
    """

    def __init__(self, output: Output, agent: str, *, quiet: bool, building: Callable[[], str] = str) -> None:
        self._output = output
        self._building = building
        self._agent = agent
        self._quiet = quiet
        self._ends: deque[float] = deque()
        self._rewards: list[float] = []
        self._failures: Counter[str] = Counter()
        self._began = time.monotonic()

    def tell(self, news: Progress) -> None:
        """Take note of a rollout that has ended."""
        latest = news.latest
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
            verdict = latest.verdict or f"not graded: {latest.detail}"
            name = f"{latest.instance_id}" + (f" #{latest.attempt}" if latest.attempt else "")
            self._output.note(f"{news.done}/{news.total} {self._agent} {name}: {verdict}")

    async def follow(self, batch: Batch) -> None:
        """Show how a batch goes on, until cancelled."""
        if self._quiet or not self._output.terminal:
            return
        from rich.console import Console  # noqa: PLC0415 - costs more than most commands; only terminals pay for it
        from rich.live import Live  # noqa: PLC0415 - the same

        console = Console(stderr=True, highlight=False)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            self._output.through(lambda line: console.print(line, markup=False, soft_wrap=True))
            try:
                while True:
                    live.update(self.panel(batch), refresh=True)
                    await asyncio.sleep(_PAUSE)
            finally:
                self._output.through(None)

    def panel(self, batch: Batch) -> RenderableType:
        """Return what is shown.

        Args:
            batch: what it is about.
        """
        from rich.table import Table  # noqa: PLC0415 - as above
        from rich.text import Text  # noqa: PLC0415 - as above

        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for name, text in self.lines(batch):
            table.add_row(Text(name, style="bold"), Text(text))
        return table

    def lines(self, batch: Batch) -> list[tuple[str, str]]:
        """Return what is shown, as names and texts.

        Args:
            batch: what it is about.
        """
        stages = batch.stages
        left = batch.seconds_left
        rate = self._rate()
        speed = f", {rate:.1f} a minute" if rate else ""
        rest = (
            f", about {human_seconds(max(left, 1.0))} left"
            if left is not None and stages["ended"] < batch.total
            else ""
        )
        shown = [
            ("rollouts", f"{stages['ended']} of {batch.total}{speed}{rest}"),
            ("stages", ", ".join(f"{count} {stage}" for stage, count in stages.items() if count)),
        ]
        if building := self._building():
            shown.append(("images", building))
        if self._rewards:
            mean = sum(self._rewards) / len(self._rewards)
            shown.append(("reward", f"{mean:.3f} of {len(self._rewards)}"))
        if self._failures:
            shown.append(("failures", ", ".join(f"{count} x {kind}" for kind, count in self._failures.most_common(4))))
        return shown

    def _rate(self) -> float:
        """Rollouts in a minute, lately."""
        now = time.monotonic()
        while self._ends and now - self._ends[0] > _WINDOW:
            self._ends.popleft()
        span = min(now - self._began, _WINDOW)
        return 60 * len(self._ends) / span if span > 1 else 0.0
