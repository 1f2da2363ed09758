"""Rollouts in real sandboxes, with the model that is trained and rewards from hidden tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from minisandbox.agents import AgentLimits, AgentOptions, open_agent
from minisandbox.models import Model, Sampling
from minisandbox.models.seeding import SeededModel
from minisandbox.rollouts import ImageOf, KnownGrades, RunDirectory, Setup, rollout_async
from minisandbox.rollouts.rollout import graders
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.train.config import Policy, RlConfig
from minisandbox.train.groups import Result, Rollouts, Wanted
from minisandbox.trajectories import Trajectory

__all__ = ["Place", "SandboxRollouts", "SandboxSetting", "SeededModel", "ThisMachine"]


class Place(Protocol):
    """Where the sandboxes are."""

    def open(self, setup: Setup) -> None:
        """Get ready; calling it again, with another sampling, does nothing."""

    async def rollout(self, task: Task, attempt: int, setup: Setup, seed: int) -> Trajectory:
        """Do a rollout.

        Args:
            task: the task.
            attempt: which rollout of it.
            setup: how it is done.
            seed: of its answers.
        """

    def close(self) -> None:
        """Let go of everything; calling it again does nothing."""


class ThisMachine:
    """Sandboxes on this machine.

    Args:
        image_of: returns a task's image; called in a thread.
        gradings: submissions that are graded at once; one for each CPU if None.
    """

    def __init__(self, image_of: ImageOf, gradings: int | None = None) -> None:
        self._image_of = image_of
        self._graders = graders(gradings)

    def open(self, setup: Setup) -> None:
        """Nothing is to be made."""

    async def rollout(self, task: Task, attempt: int, setup: Setup, seed: int) -> Trajectory:
        """As :meth:`Place.rollout`."""
        image = await asyncio.to_thread(self._image_of, task)
        drawn = Draw(setup.sampling, seed).of(setup)
        return await rollout_async(task, image, drawn, attempt=attempt, graders=self._graders)

    def close(self) -> None:
        """As :meth:`Place.close`."""
        self._graders.close()


class SandboxRollouts:
    """Does rollouts in sandboxes, and keeps each one's trajectory.

    Args:
        tasks: by id.
        place: where the sandboxes are.
        model: what the agent asks; it serves all rollouts.
        policy: how it acts.
        out: the run directory that the trajectories go to; None: they are not kept.
        temperature: of the sampling, where it is not the policy's.
        grades: those that are known, where equal submissions are graded once.
        unconfirmed: the reward of a pass that could not be confirmed; None: it has none.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        place: Place,
        model: Model,
        policy: Policy,
        *,
        out: Path | None = None,
        temperature: float | None = None,
        grades: KnownGrades | None = None,
        unconfirmed: float | None = None,
    ) -> None:
        options = AgentOptions(
            action_format=policy.action_format, prompt=Path(policy.prompt) if policy.prompt is not None else None
        )
        self._tasks, self._place, self._unconfirmed = tasks, place, unconfirmed
        self._setup = Setup(
            agent=open_agent(policy.agent, options if policy.agent == "bash" else None),
            model=model,
            sampling=Sampling(
                temperature=policy.temperature if temperature is None else temperature, max_tokens=policy.max_tokens
            ),
            agent_limits=AgentLimits(steps=policy.steps, seconds=policy.seconds, context=policy.context),
            deadline=policy.deadline,
            configuration={"agent": policy.agent, "action_format": policy.action_format},
            grades=grades,
        )
        place.open(self._setup)
        self._run = None if out is None else RunDirectory.open(out, {"agent": policy.agent, "model": model.name})

    async def run(self, wanted: Wanted) -> Result:
        """As :meth:`.Rollouts.run`."""
        task = self._tasks[wanted.task]
        found = await self._place.rollout(task, wanted.attempt, self._setup, wanted.seed)
        if self._run is not None:
            await asyncio.to_thread(self._run.write, found)
        detail = "" if found.failure is None else f"{found.failure.phase}: {found.failure.kind}: {found.failure.detail}"
        if found.unconfirmed and found.grade is not None:
            detail = f"unconfirmed: {found.grade.detail}"
        return Result(wanted, found.reward_or(self._unconfirmed), found.rows, detail)

    def close(self) -> None:
        """Close the run directory; calling it again does nothing."""
        if self._run is not None:
            self._run.close()


class SandboxSetting:
    """Where rollouts are done: in sandboxes. It is a :class:`.Setting`.

    Trajectories are kept in the run's ``rollouts`` and ``evaluation``, which ``minisandbox trajectories`` reads.

    Args:
        config: the experiment.
        tasks: to train on, by id.
        held_out: to evaluate on, by id.
        place: where the sandboxes are: what returns a task's image, for this machine, or nodes of a cluster
            (:class:`.TrainingNodes`).
    """

    def __init__(
        self, config: RlConfig, tasks: Mapping[str, Task], held_out: Mapping[str, Task], place: ImageOf | Place
    ) -> None:
        self._config = config
        self._place: Place = ThisMachine(place, config.gradings or None) if callable(place) else place
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
        """As :meth:`.Setting.rollouts`."""
        config = self._config
        made = SandboxRollouts(
            self._held_out if held_out else self._tasks,
            self._place,
            model,
            config.policy,
            out=Path(config.out) / ("evaluation" if held_out else "rollouts"),
            temperature=config.evaluation.temperature if held_out else None,
            grades=self._grades,
            unconfirmed=None if held_out else config.groups.unconfirmed_reward,
        )
        self._opened.append(made)
        return made

    def close(self) -> None:
        """Close the run directories and the place; calling it again does nothing."""
        for one in self._opened:
            one.close()
        self._place.close()
