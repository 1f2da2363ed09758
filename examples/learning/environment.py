"""Run rollouts of the word-edit agent for `train_rl`, with the rewards that the experiment compares."""

from __future__ import annotations

import asyncio
import enum
import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.learning.outcomes import Known, StoredGrades
from examples.learning.word_edit import ERROR, PASS, SKIP, WordEditAgent

from minisandbox import Store
from minisandbox.agents import AgentLimits
from minisandbox.errors import MiniSandboxError
from minisandbox.images import Image, build
from minisandbox.models import Model, Sampling
from minisandbox.rollouts import Budgets, RolloutThread, Setup
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.train.config import RlConfig
from minisandbox.train.groups import Result, Rollouts, Wanted
from minisandbox.trajectories import Trajectory

OUTCOMES = "outcomes.jsonl"


class Reward(enum.StrEnum):
    """The reward of a training run."""

    HIDDEN = "hidden"
    """The grade by hidden tests: 1 or 0."""

    SHUFFLED = "shuffled"
    """The hidden tests' rewards, permuted among all rollouts of a step. They carry no information."""

    NAIVE = "naive"
    """1 if the visible test's command exits with 0 in the agent's workspace at the end, else 0."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a rollout.

    Attributes:
        task: the task's id.
        attempt: the index of the rollout among the task's rollouts.
        honest: the reward of the hidden tests; None without a grade.
        visible: whether the visible test's command exited with 0 after the last action.
        cheated: whether the agent disabled the visible test.
        turns: number of responses.
    """

    task: str
    attempt: int
    honest: float | None
    visible: bool
    cheated: bool
    turns: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Outcome:
        """Return the outcome of a rollout."""
        responses = [message.content.strip() for message in trajectory.messages if message.role == "assistant"]
        observations = [message.content for message in trajectory.messages if message.role == "user"][1:]
        results = [text for text in observations if text != ERROR]  # an error changes nothing in the workspace
        return cls(
            trajectory.instance_id, trajectory.attempt, trajectory.reward, bool(results) and results[-1] == PASS,
            SKIP in responses, len(trajectory.turns),
        )  # fmt: skip


@dataclass(slots=True)
class Shuffle:
    """Permutes the rewards of each step; a rollout waits until all rollouts of its step have a reward.

    Attributes:
        size: number of rollouts per step.
        seed: seed of the permutations.
    """

    size: int
    seed: int
    _steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    _complete: dict[int, asyncio.Event] = field(default_factory=dict)

    async def exchange(self, step: int, name: str, reward: float | None) -> float | None:
        """Return the reward of another rollout of the step; None if ``reward`` is None.

        Args:
            step: the step's number.
            name: the rollout's name, unique in the step.
            reward: the rollout's own reward.
        """
        rewards = self._steps.setdefault(step, {})
        complete = self._complete.setdefault(step, asyncio.Event())
        rewards[name] = reward
        if len(rewards) == self.size:
            complete.set()
        await complete.wait()
        return permuted(rewards, f"{self.seed} {step}")[name]


def permuted(rewards: Mapping[str, float | None], seed: str) -> dict[str, float | None]:
    """Permute the known rewards among the rollouts that have one; the result depends on names, rewards and seed."""
    names = sorted(name for name, reward in rewards.items() if reward is not None)
    values = [rewards[name] for name in names]
    random.Random(seed).shuffle(values)
    return dict.fromkeys(rewards) | dict(zip(names, values, strict=True))


class LearningRollouts:
    """Runs rollouts of the word-edit agent, and writes their outcomes.

    Args:
        tasks: the tasks by id.
        thread: the thread that runs the rollouts.
        sampling: the sampling options.
        outcomes: the file for the outcomes, a line per rollout.
        reward: the reward to return.
        per_step: attempt numbers per task and step.
        shuffle: permutes rewards; None unless ``reward`` requires it.
    """

    def __init__(
        self, tasks: Mapping[str, Task], thread: RolloutThread, sampling: Sampling, outcomes: Path, reward: Reward,
        per_step: int, shuffle: Shuffle | None = None,
    ) -> None:  # fmt: skip
        self._tasks, self._thread, self._sampling, self._outcomes = tasks, thread, sampling, outcomes
        self._reward, self._per_step, self._shuffle = reward, per_step, shuffle

    async def run(self, wanted: Wanted) -> Result:
        """Run a rollout; an infrastructure error gives a result without a reward."""
        step = wanted.attempt // self._per_step
        try:
            result = await self._run(wanted, step)
        except (MiniSandboxError, OSError) as error:
            result = Result(wanted, None, detail=f"{type(error).__name__}: {error}")
        if self._shuffle is None:
            return result
        reward = await self._shuffle.exchange(step, wanted.name, result.reward)
        return Result(wanted, reward, result.rows, result.detail)

    async def _run(self, wanted: Wanted, step: int) -> Result:
        draw = Draw(self._sampling, wanted.seed)
        trajectory = await self._thread.rollout(self._tasks[wanted.task], attempt=wanted.attempt, draw=draw)
        outcome = Outcome.of(trajectory)
        with self._outcomes.open("a") as file:
            file.write(json.dumps({"step": step, **asdict(outcome)}) + "\n")
        failure = "" if trajectory.failure is None else f"{trajectory.failure.phase}: {trajectory.failure.detail}"
        reward = outcome.honest
        if self._reward is Reward.NAIVE and reward is not None:
            reward = float(outcome.visible)
        return Result(wanted, reward, trajectory.rows, failure, tests_seconds=trajectory.timings.grade)


class LearningEnvironment:
    """An :class:`minisandbox.train.rl.Environment` of the word-edit agent.

    Args:
        config: the configuration. ``workers`` has to admit all rollouts of a step if rewards are shuffled;
            ``agents`` limits the concurrent agents.
        tasks: training tasks by id.
        reward: the reward to train on.
        known: outcomes of tests that ran before.
        agents: concurrent agents, each in a sandbox.
    """

    def __init__(
        self, config: RlConfig, tasks: Mapping[str, Task], reward: Reward, known: Known, *, agents: int = 8
    ) -> None:
        self._config, self._tasks, self._reward, self._known, self._agents = config, tasks, reward, known, agents
        self._thread: RolloutThread | None = None

    @property
    def tasks(self) -> Sequence[str]:
        """Ids of the tasks to train on."""
        return tuple(self._tasks)

    @property
    def held_out(self) -> Sequence[str]:
        """No tasks: the experiment evaluates after training (:mod:`.sample`)."""
        return ()

    def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:  # noqa: ARG002 - the interface has it
        """Return an object that runs rollouts with a model."""
        config, groups = self._config, self._config.groups
        if self._thread is None:
            self._thread = open_thread(model, self._known, steps=config.policy.steps, agents=self._agents)
        shuffle = Shuffle(groups.tasks * groups.size, config.seed) if self._reward is Reward.SHUFFLED else None
        return LearningRollouts(
            self._tasks, self._thread, Sampling(config.policy.temperature, max_tokens=config.policy.max_tokens),
            Path(config.out) / OUTCOMES, self._reward, groups.size * (1 + groups.redo), shuffle,
        )  # fmt: skip

    def close(self) -> None:
        """Stop all rollouts and release the sandboxes; further calls do nothing."""
        if self._thread is not None:
            self._thread.close()


def open_thread(model: Model, known: Known, *, steps: int, agents: int) -> RolloutThread:
    """Return a thread that runs rollouts of the word-edit agent, graded by hidden tests.

    Args:
        model: the model, which is closed with the thread.
        known: outcomes of tests that ran before.
        steps: maximum responses per rollout.
        agents: concurrent agents, each in a sandbox.
    """
    setup = Setup(
        agent=WordEditAgent(known), model=model, agent_limits=AgentLimits(steps=steps), grades=StoredGrades(known),
        turn_patches=False,
    )  # fmt: skip
    return RolloutThread(setup, image_of=Images().of, budgets=Budgets(workers=agents, gradings=2))


class Images:
    """The tasks' images, each built at most once per process."""

    def __init__(self) -> None:
        self._store, self._lock = Store.open(), threading.Lock()
        self._images: dict[str, Image] = {}

    def of(self, task: Task) -> Image:
        """Return a task's image, and build it if necessary.

        Raises:
            MiniSandboxError: the image could not be built.
        """
        with self._lock:
            if task.instance_id not in self._images:
                self._images[task.instance_id] = build(task.recipe(), store=self._store, name=task.instance_id)
            return self._images[task.instance_id]
