"""Rollouts of a trainer on this machine: how many gradings at once, and what becomes of agents that take too long."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import waiting

from minisandbox.agents import Ending, OracleAgent, Session
from minisandbox.errors import InvalidValue
from minisandbox.grade import Grade
from minisandbox.images import Image
from minisandbox.models import ScriptedModel
from minisandbox.rollouts import Budgets, RolloutThread, Setup
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task
from minisandbox.train.config import Groups, Policy, RlConfig
from minisandbox.train.groups import Gatherer
from minisandbox.train.sandboxes import SandboxEnvironment

pytestmark = pytest.mark.kernel
MODULE = sys.modules["minisandbox.rollouts.rollout"]
"""The module; the package has a function of its name."""


class Hanging:
    """An agent that never ends."""

    name = "hanging"
    needs_model = True

    async def run(self, task: Task, session: Session) -> Ending:
        await OracleAgent().run(task, session)
        await asyncio.sleep(3600)
        raise AssertionError


class Counting:
    """Grades, and counts how many at once."""

    def __init__(self, inner: Callable[..., Grade]) -> None:
        self.inner, self.lock, self.now, self.most = inner, threading.Lock(), 0, 0
        self.begun = threading.Event()

    def __call__(self, *args: object) -> Grade:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.begun.set()
        try:
            time.sleep(0.3)  # others would begin meanwhile
            return self.inner(*args)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    found = Counting(MODULE._grade)
    monkeypatch.setattr(MODULE, "_grade", found)
    return found


@pytest.mark.slow
def test_gradings_are_bounded(smith: Task, smith_image: Image, counting: Counting) -> None:
    with one_grading(smith_image) as thread:

        async def step() -> list[float | None]:
            rollouts = await asyncio.gather(*(thread.rollout(smith, attempt=number) for number in range(4)))
            return [rollout.reward for rollout in rollouts]

        assert asyncio.run(step()) == [1.0] * 4
    assert counting.most == 1


def test_a_cancelled_rollout_does_not_wait_for_its_turn(smith: Task, smith_image: Image, counting: Counting) -> None:
    with one_grading(smith_image) as thread:

        async def step() -> None:
            first = asyncio.create_task(thread.rollout(smith))
            await asyncio.to_thread(counting.begun.wait, 60)
            queued = asyncio.create_task(thread.rollout(smith, attempt=1))
            await asyncio.sleep(0.1)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(queued, 20)
            assert (await first).reward == 1.0

        asyncio.run(step())
    assert counting.most == 1


def test_a_cancelled_rollout_stops_its_agent_and_frees_its_place(smith: Task, smith_image: Image) -> None:
    begun: list[tuple[int, str]] = []

    class Noting(Hanging):
        needs_model = False

        async def run(self, task: Task, session: Session) -> Ending:
            begun.append((session.attempt, session.box.id))
            return await super().run(task, session)

    limits = Budgets(workers=1)
    with RolloutThread(Setup(agent=Noting()), image_of=lambda _: smith_image, budgets=limits) as thread:

        async def step() -> None:
            running = [asyncio.create_task(thread.rollout(smith, attempt=0))]
            await asyncio.to_thread(waiting.until, lambda: begun)
            running += [asyncio.create_task(thread.rollout(smith, attempt=number)) for number in (1, 2)]
            await asyncio.sleep(0)  # both are in the queue
            running[1].cancel()
            running[0].cancel()
            await asyncio.to_thread(waiting.until, lambda: len(begun) == 2)
            assert not is_live(begun[0][1])
            running[2].cancel()
            await asyncio.to_thread(waiting.until, lambda: not is_live(begun[1][1]))

        asyncio.run(step())
    assert [attempt for attempt, _ in begun] == [0, 2], "what was cancelled in the queue began"


def is_live(box: str) -> bool:
    return box in {sandbox.id for sandbox in Sandbox.list()}


def one_grading(image: Image) -> RolloutThread:
    limits = Budgets(workers=4, gradings=1)
    return RolloutThread(Setup(agent=OracleAgent()), image_of=lambda _: image, budgets=limits)


def config(out: Path, deadline: float) -> RlConfig:
    acting = Policy(agent=f"{__name__}:Hanging", deadline=deadline)
    return RlConfig(model="m", tasks=("t",), out=str(out), groups=Groups(tasks=1, size=2), policy=acting)


@pytest.mark.slow
def test_an_agent_that_takes_too_long_is_graded(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    """As with SkyRL: a rollout that is dropped would hide what it costs to take long."""
    made = config(tmp_path, deadline=3.0)
    setting = SandboxEnvironment(made, {smith.instance_id: smith}, {}, lambda _: smith_image)
    try:
        rollouts = setting.rollouts(ScriptedModel(["x"]), held_out=False)
        gatherer = Gatherer(rollouts, made.groups, 2, made.rollout_deadline)
        (found,) = asyncio.run(gatherer.do([gatherer.wanted(smith.instance_id, 0)]))
    finally:
        setting.close()
    assert (found.reward, found.detail) == (1.0, "")


def test_a_rollout_has_time_for_its_grading() -> None:
    with pytest.raises(InvalidValue, match="rollout_deadline 100 is not above policy"):
        RlConfig(model="m", tasks=("t",), out="o", policy=Policy(deadline=100.0), rollout_deadline=100.0)
