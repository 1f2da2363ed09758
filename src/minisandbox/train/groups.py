"""Run the rollouts of a training step in groups, repeat failed rollouts, and compute advantages.

A group consists of a step's rollouts of one task. A rollout's advantage is its reward minus the group's mean reward
(GRPO, arXiv 2402.03300). A rollout with an infrastructure error has no reward. It is repeated, and left out if the
repetition fails too. A group whose rewards are all equal has no signal, and is replaced by a group of another task.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from minisandbox.errors import MiniSandboxError, TrainingError
from minisandbox.models import TokenRow
from minisandbox.models.protocol import seed_of
from minisandbox.train.config import Groups
from minisandbox.train.progress import RolloutProgress
from minisandbox.train.rows import TrainingRow


@dataclass(frozen=True, slots=True)
class Wanted:
    """A rollout to run.

    Attributes:
        task: the task's id.
        attempt: a number from 0, which is unique among the task's rollouts in a run.
        seed: the seed of all sampling in the rollout.
    """

    task: str
    attempt: int
    seed: int

    @property
    def name(self) -> str:
        """The rollout's name in errors and logs."""
        return f"{self.task}__{self.attempt}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a rollout.

    Attributes:
        wanted: the rollout.
        reward: the submission's reward; None after an infrastructure error or an unconfirmed pass.
        rows: the rows of tokens that were read and sampled.
        detail: the error message, or "".
        seconds: the rollout's duration.
        overlong: whether a limit stopped the agent.
        queue_seconds: time that the rollout's requests waited for the engine.
        model_seconds: time in which the engine worked on them.
        tests_seconds: time of the grading.
    """

    wanted: Wanted
    reward: float | None
    rows: tuple[TokenRow, ...] = ()
    detail: str = ""
    seconds: float = 0.0
    overlong: bool = False
    queue_seconds: float = 0.0
    model_seconds: float = 0.0
    tests_seconds: float = 0.0


class Rollouts(Protocol):
    """The interface to run rollouts, several at once, on one event loop."""

    async def run(self, wanted: Wanted) -> Result:
        """Run one rollout; if cancelled, stop the rollout and release all its resources.

        Raises:
            MiniSandboxError: an infrastructure error, which may also be returned as a result without a reward.
            OSError: an infrastructure error.
        """
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """A task's rollouts in a step.

    Attributes:
        task: the task's id.
        results: the rollouts.
    """

    task: str
    results: tuple[Result, ...]

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each rollout."""
        return [result.reward for result in self.results]

    @property
    def informative(self) -> bool:
        """Whether the group has a signal: at least two of its rewards differ."""
        return len({reward for reward in self.rewards if reward is not None}) > 1


@dataclass(frozen=True, slots=True)
class Step:
    """The rollouts of one optimiser step.

    Attributes:
        number: the step's number, from 0.
        groups: groups to train on.
        silent: groups without signal: all rewards are equal, or at most one is known.
        failed: number of rollouts without a reward even after repetition.
        redone: number of repetitions.
        refilled: number of groups that replaced groups without signal.
        seconds: duration of the step's rollouts.
    """

    number: int
    groups: tuple[Group, ...]
    silent: tuple[Group, ...] = ()
    failed: int = 0
    redone: int = 0
    refilled: int = 0
    seconds: float = 0.0

    def rows(self, scale: str, *, leave_one_out: bool = False, overlong: bool = True) -> list[TrainingRow]:
        """Return all training rows of rollouts with a reward.

        A rollout has several rows if its history was forked or summarised, or if it has sub-agents. The weight of each
        row is the rollout's advantage.

        Args:
            scale: as for :func:`advantages`.
            leave_one_out: as for :func:`advantages`.
            overlong: whether to include rollouts whose agent was stopped by a limit.
        """
        rows = []
        for group in self.groups:
            weights = advantages(group.rewards, scale, leave_one_out=leave_one_out)
            for result, weight in zip(group.results, weights, strict=True):
                is_left_out = result.reward is None or (result.overlong and not overlong)
                total = 0 if is_left_out else sum(sum(row.mask) for row in result.rows)
                rows += [
                    TrainingRow.of(
                        row, rollout=result.wanted.name, weight=weight, task=group.task, share=sum(row.mask) / total
                    )
                    for row in result.rows
                    if total and any(row.mask)
                ]
        return rows

    @property
    def rollouts_forked(self) -> int:
        """The number of rollouts with several rows that carry loss."""
        return sum(sum(any(row.mask) for row in result.rows) > 1 for group in self.groups for result in group.results)

    @property
    def reward(self) -> float | None:
        """The mean of all known rewards, groups without signal included; None if no reward is known."""
        rewards = [reward for group in (*self.groups, *self.silent) for reward in group.rewards if reward is not None]
        return statistics.fmean(rewards) if rewards else None

    def stats(self) -> dict[str, float]:
        """Return the statistics to log."""
        results = [result for group in (*self.groups, *self.silent) for result in group.results]
        times = [result.seconds for result in results]
        parts = {
            f"{name}_seconds_mean": round(statistics.fmean(getattr(result, f"{name}_seconds") for result in results), 3)
            for name in ("queue", "model", "tests")
            if results
        }
        return parts | {
            "reward": float("nan") if self.reward is None else self.reward,
            "groups": len(self.groups),
            "groups_silent": len(self.silent),
            "groups_refilled": self.refilled,
            "rollouts_failed": self.failed,
            "rollouts_overlong": sum(result.overlong for group in self.groups for result in group.results),
            "rollouts_redone": self.redone,
            "rollouts_seconds": round(self.seconds, 3),
            "rollout_seconds_max": round(max(times, default=0.0), 3),
            "rollouts_forked": self.rollouts_forked,
        }


def advantages(rewards: Sequence[float | None], scale: str = "none", *, leave_one_out: bool = False) -> list[float]:
    """Return each reward minus the mean of the known rewards, or 0.0 for an unknown reward.

    Args:
        rewards: a group's rewards; None if unknown.
        scale: ``group`` to divide by the standard deviation of the rewards; ``none`` not to.
        leave_one_out: subtract the mean of the other rewards (RLOO, arXiv 2402.14740).
    """
    numbers = [reward for reward in rewards if reward is not None]
    if len(numbers) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(numbers)
    width = statistics.stdev(numbers) + 1e-4 if scale == "group" else 1.0
    factor = len(numbers) / (len(numbers) - 1) if leave_one_out else 1.0
    return [0.0 if reward is None else (reward - mean) * factor / width for reward in rewards]


def tasks_of_step(tasks: Sequence[str], count: int, step: int, seed: int) -> tuple[list[str], list[str]]:
    """Return a step's tasks, and shuffled spare tasks that may replace groups without signal.

    An epoch contains every task once, and no step contains a task twice. If an epoch ends within a step, the next epoch
    may repeat a few tasks and omit as many. The result depends on the arguments alone, so a resumed run chooses the
    same tasks.

    Args:
        tasks: all tasks.
        count: number of tasks per step, at most the number of all tasks.
        step: the step's number, from 0.
        seed: seed of the order.
    """
    chosen: list[str] = []
    first = step * count
    while len(chosen) < count:
        epoch, start = divmod(first + len(chosen), len(tasks))
        order = random.Random(f"{seed} {epoch}").sample(list(tasks), len(tasks))  # noqa: S311 - not a secret
        # If an epoch ends within this step, skip tasks of the next epoch that the step already contains.
        chosen += [task for task in order[start:] if task not in chosen][: count - len(chosen)]
    spare = [task for task in tasks if task not in chosen]
    random.Random(f"{seed} spare {step}").shuffle(spare)  # noqa: S311 - not a secret
    return chosen, spare


@dataclass(slots=True)
class Gatherer:
    """Run the rollouts of training steps, several at once, and repeat failed rollouts.

    Attributes:
        rollouts: runs single rollouts.
        groups: the options of groups.
        workers: maximum number of concurrent rollouts.
        deadline: seconds after which a rollout counts as failed. Agents have an earlier limit, after which their
            changes are graded.
        seed: seed of all sampling, for deterministic runs; None for random seeds.
        notice: called with messages about failed rollouts.
        progress: reports the progress of the rollouts.
    """

    rollouts: Rollouts
    groups: Groups
    workers: int
    deadline: float
    seed: int | None = None
    notice: Callable[[str], object] = lambda _: None
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.workers)

    async def gather(self, number: int, tasks: Sequence[str], spare: Iterable[str] = ()) -> Step:
        """Run a step's rollouts.

        Args:
            number: the step's number.
            tasks: the step's tasks.
            spare: tasks that may replace groups without signal.

        Raises:
            TrainingError: no rollout has a reward, so there is nothing to train on.
        """
        began, others = time.monotonic(), iter(spare)
        groups, redone = await self._groups(number, tasks)
        useful, silent = _split_by_signal(groups)
        refilled = 0
        for _ in range(self.groups.refill):
            more = [task for task, _ in zip(others, range(len(tasks) - len(useful)), strict=False)]
            if not more:
                break
            new_groups, repetitions = await self._groups(number, more)
            added, useless = _split_by_signal(new_groups)
            useful, silent, refilled = useful + added, silent + useless, refilled + len(added)
            redone += repetitions
        failures = [result for group in (*useful, *silent) for result in group.results if result.reward is None]
        total = sum(len(group.results) for group in (*useful, *silent))
        if len(failures) == total:
            raise TrainingError(
                f"step {number}: none of {total} rollouts has a reward",
                reason=f"{failures[0].wanted.name}: {failures[0].detail}",
                hint="fix the cause and repeat the command: it resumes from the last checkpoint",
            )
        seconds = time.monotonic() - began
        return Step(number, tuple(useful), tuple(silent), len(failures), redone, refilled, seconds)

    async def _groups(self, number: int, tasks: Sequence[str]) -> tuple[list[Group], int]:
        """Run one group per task; return the groups and the number of repetitions."""
        size, first = self.groups.size, number * self.groups.size * (1 + self.groups.redo)
        results = await self.do([self.wanted(task, first + index) for task in tasks for index in range(size)])
        redone = await self.retry(results, lambda index, repetition: first + repetition * size + index % size)
        parts = [tuple(results[start : start + size]) for start in range(0, len(results), size)]
        return [Group(task, part) for task, part in zip(tasks, parts, strict=True)], redone

    async def retry(self, results: list[Result], attempt: Callable[[int, int], int]) -> int:
        """Repeat the rollouts without a reward, and replace their results in place.

        Args:
            results: the results of all rollouts.
            attempt: returns the attempt number of a repetition, from the rollout's index and the repetition's number.

        Returns:
            The number of repetitions.
        """
        count = 0
        for repetition in range(1, 1 + self.groups.redo):
            failed = [index for index, result in enumerate(results) if result.reward is None]
            if not failed:
                break
            count += len(failed)
            wanted = [self.wanted(results[index].wanted.task, attempt(index, repetition)) for index in failed]
            for index, result in zip(failed, await self.do(wanted), strict=True):
                results[index] = result
        return count

    def wanted(self, task: str, attempt: int) -> Wanted:
        """Return the description of a rollout to run, with its seed."""
        seed = secrets.randbits(63) if self.seed is None else seed_of(self.seed, task, attempt)
        return Wanted(task, attempt, seed)

    async def do(self, wanted: Sequence[Wanted]) -> list[Result]:
        """Run rollouts, each within the deadline; infrastructure errors become results without a reward."""
        with self.progress.reported(len(wanted)):
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run(rollout)) for rollout in wanted]
        return [task.result() for task in running]

    async def _run(self, wanted: Wanted) -> Result:
        async with self._room:
            began = time.monotonic()
            self.progress.started += 1
            try:
                async with asyncio.timeout(self.deadline):
                    result = await self.rollouts.run(wanted)
            except TimeoutError as error:
                result = Result(wanted, None, detail=str(error) or f"the rollout was stopped after {self.deadline:g} s")
            except (MiniSandboxError, OSError) as error:
                result = Result(wanted, None, detail=f"{type(error).__name__}: {error}")
            self.progress.done += 1
            if result.reward is None:
                self.notice(f"{wanted.name}: no reward: {result.detail}")
            return replace(result, seconds=time.monotonic() - began)


def _split_by_signal(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """Split groups into those with signal and those without."""
    everything = list(groups)
    informative = [group for group in everything if group.informative]
    return informative, [group for group in everything if not group.informative]
