"""Groups: the rollouts of a step, what is done about those that fail, and what each weighs.

The rollouts of a task are its group; a rollout's advantage is its reward's distance from its group's mean (GRPO,
arXiv 2402.03300). A rollout that failed on our side has no reward: it is done again, and counts nowhere if that fails
too. A group whose rewards are all the same says nothing; groups of other tasks take the places of such groups.
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
from minisandbox.models.seeding import seed_of
from minisandbox.train.config import Groups
from minisandbox.train.rows import TrainingRow


@dataclass(frozen=True, slots=True)
class Wanted:
    """A rollout that is to be done.

    Attributes:
        task: the task's id.
        attempt: which rollout of the task, from 0; no two of a run have the same.
        seed: of all that is drawn in it.
    """

    task: str
    attempt: int
    seed: int

    @property
    def name(self) -> str:
        """What errors and logs call it."""
        return f"{self.task}__{self.attempt}"


@dataclass(frozen=True, slots=True)
class Result:
    """A rollout that has ended.

    Attributes:
        wanted: which.
        reward: of its submission; None where we failed or the pass is unconfirmed.
        rows: the tokens that were read and sampled.
        detail: what failed.
        seconds: how long it took.
    """

    wanted: Wanted
    reward: float | None
    rows: tuple[TokenRow, ...] = ()
    detail: str = ""
    seconds: float = 0.0


class Rollouts(Protocol):
    """What does rollouts; several at once, on one event loop."""

    async def run(self, wanted: Wanted) -> Result:
        """Do one. A cancellation ends it, and leaves nothing behind.

        Raises:
            MiniSandboxError: it failed on our side; so does a result without a reward say.
            OSError: the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task in a step.

    Attributes:
        task: its id.
        results: its rollouts.
    """

    task: str
    results: tuple[Result, ...]

    @property
    def rewards(self) -> list[float | None]:
        """One for each rollout."""
        return [one.reward for one in self.results]

    @property
    def says_something(self) -> bool:
        """Whether there are two rewards that differ."""
        return len({one for one in self.rewards if one is not None}) > 1


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimiser step is made of.

    Attributes:
        number: of the step, from 0.
        groups: those that are trained on.
        silent: those whose rewards were all the same, or all but one missing.
        failed: rollouts that we failed at for good.
        redone: rollouts that were done again.
        refilled: groups that took other groups' places.
        seconds: how long it all took.
    """

    number: int
    groups: tuple[Group, ...]
    silent: tuple[Group, ...] = ()
    failed: int = 0
    redone: int = 0
    refilled: int = 0
    seconds: float = 0.0

    def rows(self, scale: str) -> list[TrainingRow]:
        """Return what is trained on: a row for each rollout that has a reward and sampled something.

        TRL takes one row of a rollout. Of a rollout whose history was forked or summarised, which has several, it is
        the one in which most tokens carry loss; :attr:`rows_left_out` counts the others.

        Args:
            scale: as of :func:`advantages`.
        """
        found = []
        for group in self.groups:
            for one, weight in zip(group.results, advantages(group.rewards, scale), strict=True):
                usable = [row for row in one.rows if any(row.mask)]
                if one.reward is not None and usable:
                    row = max(usable, key=lambda row: sum(row.mask))
                    found.append(TrainingRow.of(row, rollout=one.wanted.name, weight=weight, task=group.task))
        return found

    @property
    def rows_left_out(self) -> int:
        """How many rows of tokens with loss are not trained on because TRL takes one of a rollout."""
        counts = (sum(any(row.mask) for row in one.rows) for group in self.groups for one in group.results)
        return sum(max(0, count - 1) for count in counts)

    @property
    def reward(self) -> float | None:
        """The mean reward of the rollouts that have one, silent groups included; None where none has."""
        known = [one for group in (*self.groups, *self.silent) for one in group.rewards if one is not None]
        return statistics.fmean(known) if known else None

    def stats(self) -> dict[str, float]:
        """Return what a log has of it."""
        times = [one.seconds for group in (*self.groups, *self.silent) for one in group.results]
        return {
            "reward": float("nan") if self.reward is None else self.reward,
            "groups": len(self.groups),
            "groups_silent": len(self.silent),
            "groups_refilled": self.refilled,
            "rollouts_failed": self.failed,
            "rollouts_redone": self.redone,
            "rollouts_seconds": round(self.seconds, 3),
            "rollout_seconds_max": round(max(times, default=0.0), 3),
            "rows_left_out": self.rows_left_out,
        }


def advantages(rewards: Sequence[float | None], scale: str = "none") -> list[float]:
    """Return each reward's distance from the mean of those that there are; 0.0 for those that there are not.

    Args:
        rewards: of a group; None where we failed.
        scale: ``group``: divided by their standard deviation; ``none``: as it is.
    """
    known = [one for one in rewards if one is not None]
    if len(known) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(known)
    width = statistics.stdev(known) + 1e-4 if scale == "group" else 1.0
    return [0.0 if one is None else (one - mean) / width for one in rewards]


def tasks_of_step(tasks: Sequence[str], count: int, step: int, seed: int) -> tuple[list[str], list[str]]:
    """Return a step's tasks, and those that may take the places of silent groups, in their order.

    Every task comes once in an epoch, and none twice in a step: where an epoch ends in the middle of one, the next
    epoch may have a few of its tasks twice and as many not at all. It depends on nothing but the arguments: a run that
    goes on takes the tasks that it would have taken.

    Args:
        tasks: all of them.
        count: how many a step has, at most all.
        step: its number, from 0.
        seed: of the order.
    """
    chosen: list[str] = []
    place = step * count
    while len(chosen) < count:
        epoch, start = divmod(place + len(chosen), len(tasks))
        order = random.Random(f"{seed} {epoch}").sample(list(tasks), len(tasks))  # noqa: S311 - an order, no secret
        # where an epoch ends in the middle of a step, the next one begins with others than those
        chosen += [one for one in order[start:] if one not in chosen][: count - len(chosen)]
    spare = [one for one in tasks if one not in chosen]
    random.Random(f"{seed} spare {step}").shuffle(spare)  # noqa: S311 - the same
    return chosen, spare


@dataclass(slots=True)
class Gatherer:
    """Brings the rollouts of steps together.

    Attributes:
        rollouts: does them.
        groups: which make a step.
        workers: rollouts at once.
        deadline: seconds of each; one that takes longer has failed on our side. An agent is cut off before, and graded.
        seed: of all draws, where that is to be so; None: every draw is another.
        notice: is told what failed.
    """

    rollouts: Rollouts
    groups: Groups
    workers: int
    deadline: float
    seed: int | None = None
    notice: Callable[[str], object] = lambda _: None
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.workers)

    async def gather(self, number: int, tasks: Sequence[str], spare: Iterable[str] = ()) -> Step:
        """Do a step's rollouts.

        Args:
            number: of the step.
            tasks: its tasks.
            spare: tasks for groups that say nothing.

        Raises:
            TrainingError: not one rollout has a reward: going on would train on nothing.
        """
        began, others = time.monotonic(), iter(spare)
        groups, redone = await self._groups(number, tasks)
        loud, silent = _divided(groups)
        refilled = 0
        for _ in range(self.groups.refill):
            more = [one for one, _ in zip(others, range(len(tasks) - len(loud)), strict=False)]
            if not more:
                break
            found, again = await self._groups(number, more)
            added, mute = _divided(found)
            loud, silent, redone, refilled = loud + added, silent + mute, redone + again, refilled + len(added)
        failures = [one for group in (*loud, *silent) for one in group.results if one.reward is None]
        total = sum(len(group.results) for group in (*loud, *silent))
        if len(failures) == total:
            raise TrainingError(
                f"step {number}: none of {total} rollouts has a reward",
                reason=f"{failures[0].wanted.name}: {failures[0].detail}",
                hint="see to that; the same command goes on from the last checkpoint",
            )
        seconds = time.monotonic() - began
        return Step(number, tuple(loud), tuple(silent), len(failures), redone, refilled, seconds)

    async def _groups(self, number: int, tasks: Sequence[str]) -> tuple[list[Group], int]:
        """Do the groups of tasks; returns them, and how many rollouts were done again."""
        size, first = self.groups.size, number * self.groups.size * (1 + self.groups.redo)
        results = await self.do([self.wanted(task, first + one) for task in tasks for one in range(size)])
        redone = await self.do_again(results, lambda place, again: first + again * size + place % size)
        parts = [tuple(results[start : start + size]) for start in range(0, len(results), size)]
        return [Group(task, part) for task, part in zip(tasks, parts, strict=True)], redone

    async def do_again(self, results: list[Result], attempt: Callable[[int, int], int]) -> int:
        """Do those rollouts again that we failed at; the new results take their places.

        Args:
            results: of all rollouts.
            attempt: returns the number of a new attempt, by its place in them and how often it is done again.

        Returns:
            How many were done again.
        """
        count = 0
        for again in range(1, 1 + self.groups.redo):
            lost = [place for place, one in enumerate(results) if one.reward is None]
            if not lost:
                break
            count += len(lost)
            wanted = [self.wanted(results[place].wanted.task, attempt(place, again)) for place in lost]
            for place, one in zip(lost, await self.do(wanted), strict=True):
                results[place] = one
        return count

    def wanted(self, task: str, attempt: int) -> Wanted:
        """Return a rollout that is to be done."""
        seed = secrets.randbits(63) if self.seed is None else seed_of(self.seed, task, attempt)
        return Wanted(task, attempt, seed)

    async def do(self, wanted: Sequence[Wanted]) -> list[Result]:
        """Do rollouts, each within its deadline; what fails on our side is a result without a reward."""
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(self._one(one)) for one in wanted]
        return [one.result() for one in found]

    async def _one(self, wanted: Wanted) -> Result:
        async with self._room:
            began = time.monotonic()
            try:
                async with asyncio.timeout(self.deadline):
                    found = await self.rollouts.run(wanted)
            except TimeoutError as error:
                found = Result(wanted, None, detail=str(error) or f"it was cut off after {self.deadline:g} s")
            except (MiniSandboxError, OSError) as error:
                found = Result(wanted, None, detail=f"{type(error).__name__}: {error}")
            if found.reward is None:
                self.notice(f"{wanted.name}: no reward: {found.detail}")
            return replace(found, seconds=time.monotonic() - began)


def _divided(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """Groups that say something, and those that do not."""
    everything = list(groups)
    return [one for one in everything if one.says_something], [one for one in everything if not one.says_something]
