"""Report the progress of a step's rollouts, and warn about steps that teach nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_LINE_SECONDS = 60.0
_COLLAPSED = 0.1
"""The share of the first step's entropy below which the policy hardly explores."""


@dataclass(slots=True)
class RolloutProgress:
    """Reports how many rollouts of a step are done, and when the others will be.

    Attributes:
        tell: called with a line every minute.
        status: called with the same text every second, for a terminal's status line.
        sampled: returns the number of tokens that the engine has sampled so far.
        testing: returns the number of rollouts whose tests run or wait to run.
        total: number of rollouts.
        started: number of started rollouts.
        done: number of finished rollouts.
    """

    tell: Callable[[str], object] = lambda _: None
    status: Callable[[str], object] = lambda _: None
    sampled: Callable[[], int] = lambda: 0
    testing: Callable[[], int] = lambda: 0
    total: int = 0
    started: int = 0
    done: int = 0
    _began: float = 0.0
    _sampled_before: int = 0

    @contextlib.contextmanager
    def reported(self, total: int) -> Iterator[None]:
        """Report during a ``with`` block on the event loop of the rollouts.

        Args:
            total: number of rollouts.
        """
        self.total, self.started, self.done = total, 0, 0
        self._began, self._sampled_before = time.monotonic(), self.sampled()
        task = asyncio.create_task(self._report())
        try:
            yield
        finally:
            task.cancel()

    def describe(self) -> str:
        """Return the progress in one line."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        testing = min(self.testing(), self.started - self.done)
        counts = {
            "done": self.done, "with the agent": self.started - self.done - testing, "testing": testing,
            "waiting": self.total - self.started,
        }  # fmt: skip
        shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "done")
        parts = [f"{self.total} rollouts: {shown}"]
        if tokens := self.sampled() - self._sampled_before:
            parts.append(f"{tokens / seconds:.0f} tokens/s")
        if self.done:
            parts.append(f"about {seconds / self.done * (self.total - self.done):.0f} s left")
        return "; ".join(parts)

    async def _report(self) -> None:
        for second in range(1, 1 << 30):
            await asyncio.sleep(1.0)
            text = self.describe()
            self.status(text)
            if second % _LINE_SECONDS == 0:
                self.tell(text)


def describe_step(stats: Mapping[str, float]) -> str:
    """Return the results and times of a step in one line."""
    results = ", ".join(f"{key} {stats[key]:.4g}" for key in ("loss", "reward", "entropy"))
    parts = ", ".join(
        f"{name} {stats[key]:.3g}" for name in ("queue", "model", "tests") if (key := f"{name}_seconds_mean") in stats
    )
    return (
        f"{results}; rollouts {stats['rollouts_seconds']:.3g} s (mean of a rollout: {parts}), "
        f"update {stats['update_seconds']:.3g} s"
    )


def warnings_of(stats: Mapping[str, float], first_entropy: float | None) -> list[str]:
    """Return warnings about a step.

    Args:
        stats: the step's statistics.
        first_entropy: the entropy of the run's first step with rows; None if unknown. A step without rows has 0.
    """
    warnings = []
    if stats.get("groups") == 0:
        warnings.append(
            f"all {stats['groups_silent']:.0f} groups are silent: the rewards of each group are equal, so the step "
            "changes nothing; use easier or harder tasks, a larger groups.size or a higher policy.temperature"
        )
    if stats.get("learning_rate") == 0:
        warnings.append("the learning rate is 0, so the step's rollouts are wasted; lower optimizer.warmup_steps")
    entropy = stats.get("entropy")
    if entropy and first_entropy and entropy < _COLLAPSED * first_entropy:
        warnings.append(
            f"the entropy has collapsed from {first_entropy:.3g} to {entropy:.3g} nats per token: the policy hardly "
            "explores; lower optimizer.learning_rate, or set entropy or kl"
        )
    return warnings
