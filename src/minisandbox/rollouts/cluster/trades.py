"""What nodes are there for: rollouts, or checks of tasks and of predictions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, TypeVar

from minisandbox.errors import MiniSandboxError, NodeLost
from minisandbox.grade.resumable import Job as Check
from minisandbox.grade.resumable import serve
from minisandbox.models import Budget
from minisandbox.rollouts.cluster.node import Checked, Node
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.line import Job
from minisandbox.rollouts.rollout import unreached
from minisandbox.rollouts.setup import Setup
from minisandbox.tasks import Task

Done = TypeVar("Done")


class Trade(Protocol[Done]):
    """What nodes do, and what comes of it."""

    async def do(self, node: Node, job: Job) -> Done | None:
        """Have a node do a job; None where it was given back.

        Raises:
            NodeLost: the node has gone.
            NotFound: the image is not there any more.
            MiniSandboxError: no job can go on.
        """

    def unreached(self, job: Job, error: MiniSandboxError) -> Done:
        """Return what comes of a job that cannot begin."""

    def charge(self, done: Done) -> None:
        """Take it off the budget.

        Raises:
            BudgetExceeded: it is used up.
        """


class RolloutTrade:
    """Rollouts.

    Args:
        setup: how they are done, for the records of those that cannot begin.
        budget: what they may spend on their model, all nodes together.
    """

    def __init__(self, setup: Setup, budget: Budget | None = None) -> None:
        self._setup, self._budget = setup, budget

    async def do(self, node: Node, job: Job) -> Packed | None:
        """As :meth:`Trade.do`."""
        return await node.rollout(job.task, job.attempt, time.monotonic() - job.since, job.draw)

    def unreached(self, job: Job, error: MiniSandboxError) -> Packed:
        """As :meth:`Trade.unreached`."""
        waited = {"queued": time.monotonic() - job.since}
        phase = "sandbox" if isinstance(error, NodeLost) else "image"
        return pack(unreached(job.task, self._setup, job.attempt, error, waited=waited, phase=phase))

    def charge(self, done: Packed) -> None:
        """As :meth:`Trade.charge`: each node keeps to the budget by itself, all together by what has ended."""
        if self._budget is not None:
            usage = done.summary.usage
            self._budget.charge(usage.prompt + usage.completion, done.summary.cost)
            self._budget.check()


class CheckTrade:
    """Validations, and grades of predictions.

    Args:
        checks: by the id of their task.
        known: fingerprints of earlier results, by the same.
    """

    def __init__(self, checks: Mapping[str, Check], known: Mapping[str, str]) -> None:
        self._checks, self._known = checks, known

    async def do(self, node: Node, job: Job) -> Checked | None:
        """As :meth:`Trade.do`."""
        name = job.task.instance_id
        return await node.check(job.task, self._checks[name], self._known.get(name))

    def unreached(self, job: Job, error: MiniSandboxError) -> Checked:
        """As :meth:`Trade.unreached`."""

        def no_image(_: Task) -> object:
            raise error

        return Checked(serve(self._checks[job.task.instance_id], no_image, None))  # type: ignore[arg-type] # it raises

    def charge(self, done: Checked) -> None:
        """Nothing is asked of a model."""
