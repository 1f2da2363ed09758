"""Run rollouts of the trained model in sandboxes, with rewards from hidden tests."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from minisandbox.agents import AgentLimits, AgentOptions, open_agent
from minisandbox.agents.session import EXIT_OF_LIMIT
from minisandbox.models import Model, ModelOptions, Sampling
from minisandbox.rollouts import Budgets, ImageOf, KnownGrades, RolloutThread, RunDirectory, Setup
from minisandbox.rollouts.cluster import Cluster, NodeReport
from minisandbox.rollouts.cluster.joining import connect, own_address
from minisandbox.rollouts.database import unpack
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.train.config import Policy, RlConfig
from minisandbox.train.groups import Result, Rollouts, Wanted

POLICY = "policy"
"""The name by which nodes of a cluster request the trained model."""
_ENDING = 10.0


class SandboxRollouts:
    """Run rollouts in sandboxes, and store their trajectories.

    Args:
        tasks: the tasks by id.
        thread: the thread that runs the rollouts.
        sampling: the sampling options.
        run: the run directory that stores the trajectories; None to store none.
        unconfirmed: the reward of a submission whose pass could not be confirmed; None for no reward.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        thread: RolloutThread,
        sampling: Sampling,
        *,
        run: RunDirectory | None = None,
        unconfirmed: float | None = None,
    ) -> None:
        self._tasks, self._thread, self._sampling, self._run = tasks, thread, sampling, run
        self._unconfirmed = unconfirmed

    async def run(self, wanted: Wanted) -> Result:
        """Run a rollout, and store its trajectory."""
        draw = Draw(self._sampling, wanted.seed)
        packed = await self._thread.packed(self._tasks[wanted.task], attempt=wanted.attempt, draw=draw)
        if self._run is not None:
            await asyncio.to_thread(self._run.keep, packed)
        rollout = await asyncio.to_thread(unpack, packed.trajectory, name=wanted.name)
        failure = rollout.failure
        detail = "" if failure is None else f"{failure.phase}: {failure.kind}: {failure.detail}"
        if rollout.unconfirmed and rollout.grade is not None:
            detail = f"unconfirmed: {rollout.grade.detail}"
        overlong = any(status in rollout.exit_status for status in EXIT_OF_LIMIT.values())
        queued = sum(turn.queued for turn in rollout.turns)
        return Result(
            wanted, rollout.reward_or(self._unconfirmed), rollout.rows, detail, overlong=overlong, queue_seconds=queued,
            model_seconds=rollout.timings.model - queued, tests_seconds=rollout.timings.grade,
        )  # fmt: skip

    @property
    def testing(self) -> int:
        """Number of rollouts whose submissions are graded or wait for it."""
        return self._thread.testing


class SandboxEnvironment:
    """An :class:`.Environment` that runs rollouts in sandboxes.

    It stores trajectories in the run's directories ``rollouts`` and ``evaluation``, for ``minisandbox trajectories``.

    Args:
        config: the experiment's configuration.
        tasks: training tasks by id.
        held_out: evaluation tasks by id.
        machines: a function that returns a task's image, to run rollouts on this machine; or a cluster. The cluster's
            ``model`` is ignored, because its nodes use the trainer's engine. The engine is served at this machine's
            address, protected by a key that is generated for this run and sent to the nodes.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(
        self, config: RlConfig, tasks: Mapping[str, Task], held_out: Mapping[str, Task], machines: ImageOf | Cluster
    ) -> None:
        if isinstance(machines, Cluster):
            machines.check()
        self._config, self._machines = config, machines
        self._tasks, self._held_out = tasks, held_out
        self._grades = KnownGrades() if config.reuse_grades else None
        self._cluster: Cluster | None = None
        self._thread: RolloutThread | None = None
        self._server: _EngineServer | None = None
        self._runs: list[RunDirectory] = []

    @property
    def tasks(self) -> Sequence[str]:
        """Ids of the tasks to train on."""
        return tuple(self._tasks)

    @property
    def held_out(self) -> Sequence[str]:
        """Ids of the tasks to evaluate on."""
        return tuple(self._held_out)

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes of the cluster, including lost ones."""
        return () if self._cluster is None else self._cluster.reports

    def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:
        """Return an object that runs rollouts with a model.

        Raises:
            HostError: there is no such cluster, or this machine does not belong to it.
        """
        config, policy = self._config, self._config.policy
        if self._thread is None:
            self._thread = self._open(model)
        out = Path(config.out) / ("evaluation" if held_out else "rollouts")
        run = RunDirectory.open(out, {"agent": policy.agent, "model": model.name})
        self._runs.append(run)
        temperature = config.evaluation.temperature if held_out else None
        return SandboxRollouts(
            self._held_out if held_out else self._tasks,
            self._thread,
            Sampling(policy.temperature if temperature is None else temperature, max_tokens=policy.max_tokens),
            run=run,
            unconfirmed=None if held_out else config.groups.unconfirmed_reward,
        )

    def close(self) -> None:
        """Stop all rollouts, release the sandboxes and close the run directories; further calls do nothing."""
        if self._thread is not None:
            self._thread.close()
        if self._server is not None:
            self._server.close()
        for run in self._runs:
            run.close()

    def _open(self, model: Model) -> RolloutThread:
        config = self._config
        setup = _setup(config.policy, config, model, self._grades)
        limits = {"workers": config.workers} | ({"gradings": config.gradings} if config.gradings else {})
        if not isinstance(self._machines, Cluster):
            return RolloutThread(setup, image_of=self._machines, budgets=Budgets(**limits))
        connect(self._machines.address)
        self._server = _EngineServer(model, own_address())
        options = ModelOptions(POLICY, self._server.base_url, tokens="yes")
        self._cluster = replace(self._machines, model=options, api_key=self._server.key)
        return RolloutThread(setup, cluster=self._cluster, budgets=Budgets(**limits))


def _setup(policy: Policy, config: RlConfig, model: Model, grades: KnownGrades | None) -> Setup:
    prompt = Path(policy.prompt) if policy.prompt is not None else None
    options = AgentOptions(action_format=policy.action_format, prompt=prompt)
    return Setup(
        agent=open_agent(policy.agent, options if policy.agent == "bash" else None),
        model=model,
        agent_limits=AgentLimits(steps=policy.steps, seconds=policy.seconds, context=policy.context),
        timeout=config.grading.timeout,
        confirm=config.grading.confirm,
        deadline=policy.deadline,
        configuration={"agent": policy.agent, "action_format": policy.action_format},
        grades=grades,
    )


class _EngineServer:
    """An HTTP server for an engine, on its own thread because the trainer's event loop does not run during training.

    The engine samples with the step's weights, and is paused while the weights change.
    """

    def __init__(self, model: Model, host: str) -> None:
        from minisandbox.models.engine import EngineServer  # noqa: PLC0415 - needs optional packages

        self.key = secrets.token_urlsafe(24)
        self._serving = EngineServer(model, host=host, name=POLICY, key=self.key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serving.start(), self._loop).result()
        self.base_url = self._serving.base_url

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._serving.stop(), self._loop).result(_ENDING)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_ENDING)
            self._loop.close()
