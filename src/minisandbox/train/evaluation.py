"""Evaluate the resolve rate on held-out tasks before, during and after training, and plot it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from minisandbox.train.config import Evaluation
from minisandbox.train.groups import Gatherer
from minisandbox.train.running import TrainingRun

_FILE = "scores.jsonl"


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one evaluation.

    Attributes:
        step: number of optimiser steps before the evaluation.
        reward: the mean reward, which is the resolve rate.
        rollouts: number of rollouts with a reward.
        failed: number of rollouts without a reward even after repetition; the mean does not include them.
        task_error: the standard error of the mean reward, clustered by task, because a task's rollouts are correlated.
            None if there is only one task, and in runs of earlier versions.
        pass_at: by k, the probability that one of k rollouts of a task is resolved; empty in runs of earlier versions.
        tasks: each task's mean reward, likewise.
    """

    step: int
    reward: float
    rollouts: int
    failed: int
    task_error: float | None = None
    pass_at: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The standard error of the mean reward; if ``task_error`` is None, rollouts are assumed to be independent."""
        if self.task_error is not None:
            return self.task_error
        return math.sqrt(self.reward * (1 - self.reward) / self.rollouts) if self.rollouts else math.nan


class Evaluator:
    """Evaluate a policy on held-out tasks.

    Args:
        options: the options.
        tasks: ids of the tasks; empty for no evaluation.
        gatherer: runs the rollouts. Its seeds are the same in every evaluation, so that scores differ only because of
            the policy.
        run: the training run, which stores the scores.
        tell: called with progress messages.
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
        """Return the evaluations so far, including those of earlier processes."""
        return scores_of(self._run)

    def is_due(self, step: int) -> bool:
        """Return whether a step still has to be evaluated."""
        return bool(self._tasks) and all(score.step != step for score in self.scores())

    async def evaluate(self, step: int) -> Score | None:
        """Run the rollouts, repeat those without a reward, and return the score; None if no rollout has a reward."""
        attempts = self._options.attempts
        wanted = [self._gatherer.wanted(task, attempt) for task in self._tasks for attempt in range(attempts)]
        results = await self._gatherer.do(wanted)
        await self._gatherer.retry(
            results, lambda index, repetition: results[index].wanted.attempt % attempts + repetition * attempts
        )
        rewards = [(result.wanted.task, result.reward) for result in results if result.reward is not None]
        if not rewards:
            self._tell(f"step {step}: none of {len(results)} held-out rollouts has a reward")
            return None
        by_task: dict[str, list[float]] = {}
        for task, reward in rewards:
            by_task.setdefault(task, []).append(reward)
        score = Score(
            step, fmean(reward for _, reward in rewards), len(rewards), len(results) - len(rewards),
            clustered_error(rewards), pass_at(by_task.values(), attempts),
            {task: fmean(numbers) for task, numbers in by_task.items()},
        )  # fmt: skip
        failures = f"; {score.failed} have no reward" if score.failed else ""
        several = "".join(f", pass@{k} {value:.1%}" for k, value in score.pass_at.items() if k != "1")
        self._tell(f"step {step}: {score.reward:.1%} of {score.rollouts} held-out rollouts resolved{several}{failures}")
        return score

    def store(self, score: Score) -> None:
        """Add a score to the run's."""
        self._run.append(asdict(score), file=_FILE)


def pass_at(groups: Iterable[Sequence[float]], attempts: int) -> dict[str, float]:
    """Return pass@k by k = 1, 2, 4 and so on: the unbiased estimator of arXiv 2107.03374, averaged over tasks.

    Args:
        groups: the rewards of each task's rollouts; a reward of 1 is a pass. Tasks with fewer than k do not count.
        attempts: number of rollouts per task, the largest k.
    """
    values: dict[str, float] = {}
    for k in (1 << power for power in range(attempts.bit_length())):
        counts = [(len(rewards), sum(reward >= 1 for reward in rewards)) for rewards in groups if len(rewards) >= k]
        if counts:
            values[str(k)] = fmean(1 - math.comb(total - passed, k) / math.comb(total, k) for total, passed in counts)
    return values


def clustered_error(rewards: Sequence[tuple[str, float]]) -> float | None:
    """Return the standard error of a mean reward, clustered by task, or None for fewer than two tasks.

    This is the sandwich estimator of a mean (arXiv 2411.00640, section 2.2), with the factor G / (G - 1) for G
    clusters.

    Args:
        rewards: each rollout's task and reward.
    """
    mean = sum(reward for _, reward in rewards) / len(rewards)
    sums: dict[str, float] = {}
    for task, reward in rewards:
        sums[task] = sums.get(task, 0.0) + reward - mean
    if len(sums) < 2:
        return None
    square = sum(deviation * deviation for deviation in sums.values()) * len(sums) / (len(sums) - 1)
    return math.sqrt(square) / len(rewards)


def scores_of(run: TrainingRun) -> list[Score]:
    """Return a run's evaluations."""
    return [score_from(line) for line in run.lines(_FILE)]


def score_from(line: Mapping[str, object]) -> Score:
    """Convert a line of ``scores.jsonl`` to a score."""
    values: dict[str, Any] = {entry.name: line[entry.name] for entry in fields(Score) if entry.name in line}
    return Score(**values)


def draw_curve(curves: Mapping[str, Sequence[Score]], path: Path) -> None:
    """Plot learning curves with standard errors, one line per run.

    Args:
        curves: scores by run name.
        path: the output file, ``.png`` or ``.svg``.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, scores in curves.items():
        steps = [score.step for score in scores]
        axes.plot(steps, [score.reward for score in scores], marker="o", markersize=3, label=name)
        low, high = ([score.reward + sign * score.error for score in scores] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.15)
    axes.set(xlabel="optimiser steps", ylabel="resolved, held-out tasks", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_tasks(scores: Sequence[Score], path: Path) -> None:
    """Plot each task's mean reward by step as a heat map, with the easiest tasks at the top.

    Args:
        scores: a run's scores.
        path: the output file, ``.png`` or ``.svg``.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package

    tasks = sorted({task for score in scores for task in score.tasks}, key=lambda task: -_mean_of(task, scores))
    figure = Figure(figsize=(7, 1.5 + 0.2 * len(tasks)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        [[score.tasks.get(task, math.nan) for score in scores] for task in tasks], vmin=0, vmax=1, aspect="auto"
    )
    axes.set_xticks(range(len(scores)), [str(score.step) for score in scores])
    axes.set_yticks(range(len(tasks)), tasks, fontsize=6)
    axes.set(xlabel="optimiser steps")
    figure.colorbar(image, label="mean reward")
    figure.savefig(path, dpi=120)


def _mean_of(task: str, scores: Sequence[Score]) -> float:
    return fmean(score.tasks[task] for score in scores if task in score.tasks)
