"""Kinds of work that nodes do: rollouts, or checks of tasks and predictions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, TypeVar

from minisandbox.errors import MiniSandboxError, NodeLost
from minisandbox.models import Budget
from minisandbox.pool import Job as Check
from minisandbox.pool import run_job
from minisandbox.rollouts.cluster.node import Checked, Node
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.jobs import Job
from minisandbox.rollouts.rollout import unreached
from minisandbox.rollouts.setup import Setup
from minisandbox.tasks import Task

Done = TypeVar("Done")


class Workload(Protocol[Done]):
    """A kind of work that nodes do."""

    async def do(self, node: Node, job: Job) -> Done | None:
        """Have a node run a job; None if the node returned it unstarted.

        Raises:
            NodeLost: the node is lost.
            NotFound: the node's store has lost the image.
            MiniSandboxError: no job can succeed.
        """

    def unreached(self, job: Job, error: MiniSandboxError) -> Done:
        """Return the result of a job that cannot start."""

    def charge(self, done: Done) -> None:
        """Charge a result to the budget.

        Raises:
            BudgetExceeded: the budget is used up.
        """


class RolloutWorkload:
    """Rollouts.

    Args:
        setup: the agent, its model, and limits, for the records of rollouts that cannot start.
        budget: the model's budget, for all nodes together.
    """

    def __init__(self, setup: Setup, budget: Budget | None = None) -> None:
        self._setup, self._budget = setup, budget

    async def do(self, node: Node, job: Job) -> Packed | None:
        """Have a node run a rollout."""
        return await node.rollout(job.task, job.attempt, time.monotonic() - job.since, job.draw)

    def unreached(self, job: Job, error: MiniSandboxError) -> Packed:
        """Return the record of a rollout that cannot start."""
        waited = {"queued": time.monotonic() - job.since}
        phase = "sandbox" if isinstance(error, NodeLost) else "image"
        return pack(unreached(job.task, self._setup, job.attempt, error, waited=waited, phase=phase))

    def charge(self, done: Packed) -> None:
        """Charge a rollout to the common budget; each node also keeps to the budget on its own."""
        if self._budget is not None:
            usage = done.summary.usage
            self._budget.charge(usage.prompt + usage.completion, done.summary.cost)
            self._budget.check()


class CheckWorkload:
    """Validations, and grades of predictions.

    Args:
        checks: the checks by task id.
        known: fingerprints of earlier results by task id.
    """

    def __init__(self, checks: Mapping[str, Check[Task]], known: Mapping[str, str]) -> None:
        self._checks, self._known = checks, known

    async def do(self, node: Node, job: Job) -> Checked | None:
        """Have a node run a check."""
        name = job.task.instance_id
        return await node.check(job.task, self._checks[name], self._known.get(name))

    def unreached(self, job: Job, error: MiniSandboxError) -> Checked:
        """Return the result of a check that cannot start."""

        def no_image(_: Task) -> object:
            raise error

        return Checked(run_job(self._checks[job.task.instance_id], no_image, None))  # type: ignore[arg-type] # it raises

    def charge(self, done: Checked) -> None:
        """Do nothing: checks use no model."""
