"""The resolve rate on held-out tasks, before, during and after training, and its curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from minisandbox.train.config import Evaluation
from minisandbox.train.groups import Gatherer
from minisandbox.train.running import TrainingRun

_FILE = "scores.jsonl"


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluation.

    Attributes:
        step: optimiser steps before it.
        reward: the mean reward: the resolve rate.
        rollouts: how many had a reward.
        failed: how many we failed at; they count nowhere.
    """

    step: int
    reward: float
    rollouts: int
    failed: int

    @property
    def error(self) -> float:
        """The standard error of a rate of so many rollouts."""
        return math.sqrt(self.reward * (1 - self.reward) / self.rollouts) if self.rollouts else math.nan


class Evaluator:
    """Evaluates a policy.

    Args:
        options: how.
        tasks: ids of the tasks; none: nothing is evaluated.
        gatherer: does the rollouts. Their seeds are the same at every step, so that scores differ by the policy alone.
        run: where the scores are kept.
        tell: is told them.
    """

    def __init__(
        self,
        options: Evaluation,
        tasks: Sequence[str],
        gatherer: Gatherer,
        run: TrainingRun,
        tell: Callable[[str], object],
    ) -> None:
        self._options, self._tasks, self._gatherer, self._run, self._tell = options, tasks, gatherer, run, tell

    def scores(self) -> list[Score]:
        """Return the evaluations so far, those of earlier processes included."""
        return scores_of(self._run)

    def is_due(self, step: int) -> bool:
        """Whether a step is still to be evaluated."""
        return bool(self._tasks) and all(one.step != step for one in self.scores())

    async def evaluate(self, step: int) -> None:
        """Do the rollouts and keep their score."""
        wanted = [
            self._gatherer.wanted(task, attempt) for task in self._tasks for attempt in range(self._options.attempts)
        ]
        rewards = [one.reward for one in await self._gatherer.do(wanted)]
        known = [one for one in rewards if one is not None]
        if not known:
            self._tell(f"step {step}: not one of {len(rewards)} held-out rollouts has a reward")
            return
        score = Score(step, sum(known) / len(known), len(known), len(rewards) - len(known))
        self._run.append(asdict(score), file=_FILE)
        lost = f"; {score.failed} failed on our side" if score.failed else ""
        self._tell(f"step {step}: {score.reward:.1%} of {score.rollouts} held-out rollouts resolved{lost}")


def scores_of(run: TrainingRun) -> list[Score]:
    """Return a run's evaluations."""
    found = run.lines(_FILE)
    return [
        Score(int(str(o["step"])), float(str(o["reward"])), int(str(o["rollouts"])), int(str(o["failed"])))
        for o in found
    ]


def draw_curve(curves: Mapping[str, Sequence[Score]], path: Path) -> None:
    """Draw learning curves into a file: a line for each run, its standard error around it.

    Args:
        curves: by name.
        path: ``.png`` or ``.svg``.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, scores in curves.items():
        steps = [one.step for one in scores]
        axes.plot(steps, [one.reward for one in scores], marker="o", markersize=3, label=name)
        low, high = ([one.reward + sign * one.error for one in scores] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.15)
    axes.set(xlabel="optimiser steps", ylabel="resolved, held-out tasks", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
