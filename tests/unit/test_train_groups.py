from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from minisandbox.errors import SandboxCreationError, TrainingError
from minisandbox.models import TokenRow
from minisandbox.models.protocol import seed_of
from minisandbox.train.config import Groups
from minisandbox.train.groups import Gatherer, Group, Result, Step, Wanted, advantages, tasks_of_step

ROW = TokenRow(array("i", [1, 2, 3]), array("d", [0.0, -1.0, -1.0]), b"\0\1\1", (0,))
LONGER = TokenRow(array("i", [1, 2, 3, 4]), array("d", [0.0, -1.0, -1.0, -1.0]), b"\0\1\1\1", (1,))


class Fake:
    """Rewards by task and attempt; what it has done."""

    def __init__(self, reward: Callable[[Wanted], float | None]) -> None:
        self.reward = reward
        self.done: list[Wanted] = []
        self.now = self.most = 0

    async def run(self, wanted: Wanted) -> Result:
        self.done.append(wanted)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            return Result(wanted, self.reward(wanted), (ROW,), "" if self.reward(wanted) is not None else "lost")
        finally:
            self.now -= 1


def gather(fake: Fake, tasks: list[str], spare: list[str] | None = None, *, refill: int = 1) -> Step:
    groups = Groups(tasks=len(tasks), size=4, refill=refill)

    async def do() -> Step:
        return await Gatherer(fake, groups, workers=3, deadline=30.0, seed=1).gather(5, tasks, spare or [])

    return asyncio.run(do())


def half(wanted: Wanted) -> float | None:
    return float(wanted.attempt % 2)


def test_advantages() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert advantages([1.0, None, 0.0]) == [0.5, 0.0, -0.5]  # what is missing does not count as 0
    assert advantages([1.0, None, None]) == [0.0, 0.0, 0.0]
    assert advantages([]) == []
    assert advantages([1.0, 0.0, 0.0, None], leave_one_out=True) == [1.0, -0.5, -0.5, 0.0]
    assert advantages([1.0, 0.0], "group") == pytest.approx([0.5 / 0.70720678, -0.5 / 0.70720678])


def test_a_step_of_groups() -> None:
    fake = Fake(half)
    step = gather(fake, ["a", "b"])
    assert [group.task for group in step.groups] == ["a", "b"]
    assert step.reward == 0.5
    assert [row.weight for row in step.rows("none")] == [-0.5, 0.5] * 4
    assert fake.most == 3
    assert {one.attempt for one in fake.done} == {40, 41, 42, 43}  # 5 steps of 4, and as many to do again
    assert len({one.seed for one in fake.done}) == 8


def test_what_failed_is_done_again_under_another_number() -> None:
    fake = Fake(lambda one: None if one.attempt == 41 else half(one))
    step = gather(fake, ["a"])
    assert (step.redone, step.failed) == (1, 0)
    assert [one.wanted.attempt for one in step.groups[0].results] == [40, 45, 42, 43]
    assert len(step.rows("none")) == 4


def test_what_fails_for_good_is_masked() -> None:
    step = gather(Fake(lambda one: None if one.attempt in (41, 45) else half(one)), ["a"])
    assert step.failed == 1
    assert step.reward == pytest.approx(1 / 3)
    rows = step.rows("none")
    assert [row.rollout for row in rows] == ["a__40", "a__42", "a__43"]
    assert sum(row.weight for row in rows) == pytest.approx(0.0)


def test_silent_groups_are_replaced() -> None:
    fake = Fake(lambda one: 0.0 if one.task == "dull" else half(one))
    step = gather(fake, ["dull", "a"], ["b", "c"])
    assert [group.task for group in step.groups] == ["a", "b"]
    assert [group.task for group in step.silent] == ["dull"]
    assert step.refilled == 1
    assert step.reward == pytest.approx(1 / 3)  # the silent group is part of how well it does
    assert "c" not in {one.task for one in fake.done}


def test_a_step_in_which_nothing_differs_is_a_step() -> None:
    step = gather(Fake(lambda _: 0.0), ["a"], ["b"], refill=1)
    assert step.groups == ()
    assert step.rows("none") == []
    assert len(step.silent) == 2


def test_no_reward_at_all_stops_the_run() -> None:
    with pytest.raises(TrainingError, match="none of 8 rollouts has a reward") as caught:
        gather(Fake(lambda _: None), ["a"], ["b"])
    assert "lost" in str(caught.value)


def test_errors_and_stragglers_are_results_without_a_reward() -> None:
    class Faulty:
        async def run(self, wanted: Wanted) -> Result:
            if wanted.attempt == 0:
                raise SandboxCreationError("no room")
            if wanted.attempt == 1:
                await asyncio.sleep(3600)
            return Result(wanted, 1.0)

    said: list[str] = []

    async def do() -> list[Result]:
        gatherer = Gatherer(Faulty(), Groups(), workers=4, deadline=0.2, notice=said.append)
        return await gatherer.do([gatherer.wanted("t", one) for one in range(3)])

    first, second, third = asyncio.run(do())
    assert (first.reward, second.reward, third.reward) == (None, None, 1.0)
    assert "no room" in first.detail
    assert "stopped after 0.2 s" in second.detail
    assert len(said) == 2


def test_what_rollouts_took_their_time_for() -> None:
    class Slow:
        async def run(self, wanted: Wanted) -> Result:
            return Result(wanted, 1.0, queue_seconds=1.0, model_seconds=2.0, tests_seconds=float(wanted.attempt))

    async def do() -> tuple[Gatherer, list[Result]]:
        gatherer = Gatherer(Slow(), Groups(), workers=2, deadline=9.0)
        return gatherer, await gatherer.do([gatherer.wanted("t", attempt) for attempt in range(3)])

    gatherer, results = asyncio.run(do())
    assert (gatherer.progress.total, gatherer.progress.started, gatherer.progress.done) == (3, 3, 3)
    stats = Step(0, (Group("t", tuple(results)),)).stats()
    assert [stats[f"{name}_seconds_mean"] for name in ("queue", "model", "tests")] == [1.0, 2.0, 1.0]


def test_a_mistake_of_ours_is_not_taken_for_a_failure() -> None:
    class Broken:
        async def run(self, wanted: Wanted) -> Result:
            raise KeyError(wanted)

    async def do() -> None:
        gatherer = Gatherer(Broken(), Groups(), workers=4, deadline=9.0)
        await gatherer.do([gatherer.wanted("t", 0)])

    with pytest.raises(ExceptionGroup):
        asyncio.run(do())


def test_all_rows_of_a_rollout_are_trained_with_its_reward() -> None:
    context = replace(ROW, mask=b"\0\0\0")
    results = tuple(Result(Wanted("a", n, 0), float(n), (ROW, context, LONGER)) for n in range(2))
    step = Step(0, (Group("a", (*results, Result(Wanted("a", 2, 0), None, (ROW,)))),))
    rows = step.rows("none")
    assert [(row.rollout, len(row.ids), row.weight, row.share) for row in rows] == [
        ("a__0", 3, -0.5, 0.4), ("a__0", 4, -0.5, 0.6), ("a__1", 3, 0.5, 0.4), ("a__1", 4, 0.5, 0.6),
    ]  # fmt: skip
    assert step.stats()["rollouts_forked"] == 2


def test_an_overlong_rollout_may_be_left_out_but_counts_in_the_mean() -> None:
    results = tuple(Result(Wanted("a", n, 0), float(n), (ROW,), overlong=not n) for n in range(2))
    step = Step(0, (Group("a", results),))
    assert [(row.rollout, row.weight) for row in step.rows("none", overlong=False)] == [("a__1", 0.5)]
    assert len(step.rows("none")) == 2
    assert step.stats()["rollouts_overlong"] == 1


def test_every_task_comes_before_any_comes_again() -> None:
    tasks = [f"t{n}" for n in range(7)]
    steps = [tasks_of_step(tasks, 3, number, 9) for number in range(14)]
    assert all(len(set(chosen)) == 3 for chosen, _ in steps)
    assert all(sorted(chosen + spare) == tasks for chosen, spare in steps)
    counts = Counter(one for chosen, _ in steps for one in chosen)
    assert max(counts.values()) - min(counts.values()) <= 2
    assert steps == [tasks_of_step(tasks, 3, number, 9) for number in range(14)]
    assert steps != [tasks_of_step(tasks, 3, number, 8) for number in range(14)]


def test_seeds_depend_on_every_part() -> None:
    assert seed_of(1, "a", 2) == seed_of(1, "a", 2)
    assert len({seed_of(1, "a", 2), seed_of(1, "a", 3), seed_of(1, "b", 2), seed_of(2, "a", 2), seed_of(1, "a2")}) == 5
    assert 0 <= seed_of("x") < 1 << 63
