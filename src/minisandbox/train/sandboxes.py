"""Rollouts in sandboxes, with the trained model and rewards from hidden tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from minisandbox.agents import AgentLimits, AgentOptions, open_agent
from minisandbox.grade import GradingOptions
from minisandbox.models import Model, Sampling
from minisandbox.models.protocol import SeededModel
from minisandbox.rollouts import ImageOf, KnownGrades, RunDirectory, Setup, rollout_async
from minisandbox.rollouts.rollout import graders
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.train.config import Policy, RlConfig
from minisandbox.train.groups import Result, Rollouts, Wanted
from minisandbox.trajectories import Trajectory

__all__ = ["Machines", "SandboxEnvironment", "SandboxRollouts", "SeededModel", "ThisMachine"]


class Machines(Protocol):
    """Where sandboxes run."""

    def open(self, setup: Setup) -> None:
        """Prepare for rollouts; further calls, with another sampling, do nothing."""

    async def rollout(self, task: Task, attempt: int, setup: Setup, seed: int) -> Trajectory:
        """Run a rollout.

        Args:
            task: the task.
            attempt: which rollout of the task it is.
            setup: the agent, its model, and limits.
            seed: seed of its answers.
        """

    def close(self) -> None:
        """Release all resources; further calls do nothing."""


class ThisMachine:
    """Sandboxes on this machine.

    Args:
        image_of: returns a task's image; called in a thread.
        gradings: concurrent gradings; one per CPU if None.
    """

    def __init__(self, image_of: ImageOf, gradings: int | None = None) -> None:
        self._image_of = image_of
        self._graders = graders(gradings)

    def open(self, setup: Setup) -> None:
        """Do nothing: there is nothing to prepare."""

    async def rollout(self, task: Task, attempt: int, setup: Setup, seed: int) -> Trajectory:
        """Run a rollout on this machine."""
        image = await asyncio.to_thread(self._image_of, task)
        drawn = Draw(setup.sampling, seed).of(setup)
        return await rollout_async(task, image, drawn, attempt=attempt, graders=self._graders)

    def close(self) -> None:
        """Stop the grading threads."""
        self._graders.close()


class SandboxRollouts:
    """Runs rollouts in sandboxes, and stores their trajectories.

    Args:
        tasks: the tasks by id.
        machines: where the sandboxes run.
        model: the agent's model, shared by all rollouts.
        policy: options of the agent and its sampling.
        out: the run directory for the trajectories; None does not store them.
        temperature: the sampling temperature, if not the policy's.
        grades: shares grades among equal submissions; None grades each submission.
        unconfirmed: the reward of an unconfirmed pass; None for no reward.
        grading: options of grading.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        machines: Machines,
        model: Model,
        policy: Policy,
        *,
        out: Path | None = None,
        temperature: float | None = None,
        grades: KnownGrades | None = None,
        unconfirmed: float | None = None,
        grading: GradingOptions = GradingOptions(),  # noqa: B008 - frozen
    ) -> None:
        options = AgentOptions(
            action_format=policy.action_format, prompt=Path(policy.prompt) if policy.prompt is not None else None
        )
        self._tasks, self._machines, self._unconfirmed = tasks, machines, unconfirmed
        self._setup = Setup(
            agent=open_agent(policy.agent, options if policy.agent == "bash" else None),
            model=model,
            sampling=Sampling(
                temperature=policy.temperature if temperature is None else temperature, max_tokens=policy.max_tokens
            ),
            agent_limits=AgentLimits(steps=policy.steps, seconds=policy.seconds, context=policy.context),
            timeout=grading.timeout,
            confirm=grading.confirm,
            deadline=policy.deadline,
            configuration={"agent": policy.agent, "action_format": policy.action_format},
            grades=grades,
        )
        machines.open(self._setup)
        self._run = None if out is None else RunDirectory.open(out, {"agent": policy.agent, "model": model.name})

    async def run(self, wanted: Wanted) -> Result:
        """Run a rollout, and store its trajectory."""
        task = self._tasks[wanted.task]
        found = await self._machines.rollout(task, wanted.attempt, self._setup, wanted.seed)
        if self._run is not None:
            await asyncio.to_thread(self._run.write, found)
        detail = "" if found.failure is None else f"{found.failure.phase}: {found.failure.kind}: {found.failure.detail}"
        if found.unconfirmed and found.grade is not None:
            detail = f"unconfirmed: {found.grade.detail}"
        return Result(wanted, found.reward_or(self._unconfirmed), found.rows, detail)

    def close(self) -> None:
        """Close the run directory; further calls do nothing."""
        if self._run is not None:
            self._run.close()


class SandboxEnvironment:
    """Sandboxes as a :class:`.Environment`.

    Trajectories are stored in the run's ``rollouts`` and ``evaluation``, for use with ``minisandbox trajectories``.

    Args:
        config: the experiment's configuration.
        tasks: training tasks by id.
        held_out: evaluation tasks by id.
        machines: a function that returns a task's image, to run on this machine; or nodes of a cluster
            (:class:`.TrainingNodes`).
    """

    def __init__(
        self, config: RlConfig, tasks: Mapping[str, Task], held_out: Mapping[str, Task], machines: ImageOf | Machines
    ) -> None:
        self._config = config
        self._machines: Machines = ThisMachine(machines, config.gradings or None) if callable(machines) else machines
        self._tasks, self._held_out = tasks, held_out
        self._grades = KnownGrades() if config.reuse_grades else None
        self._opened: list[SandboxRollouts] = []

    @property
    def tasks(self) -> Sequence[str]:
        """Ids of the tasks to train on."""
        return tuple(self._tasks)

    @property
    def held_out(self) -> Sequence[str]:
        """Ids of the tasks to evaluate on."""
        return tuple(self._held_out)

    def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:
        """Return an object that runs rollouts with a model."""
        config = self._config
        made = SandboxRollouts(
            self._held_out if held_out else self._tasks,
            self._machines,
            model,
            config.policy,
            out=Path(config.out) / ("evaluation" if held_out else "rollouts"),
            temperature=config.evaluation.temperature if held_out else None,
            grades=self._grades,
            unconfirmed=None if held_out else config.groups.unconfirmed_reward,
            grading=config.grading,
        )
        self._opened.append(made)
        return made

    def close(self) -> None:
        """Close the run directories and release the sandboxes; further calls do nothing."""
        for one in self._opened:
            one.close()
        self._machines.close()
