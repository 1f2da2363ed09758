"""Run a trainer's rollouts on a cluster, whose nodes query the trainer's own engine over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import threading
from dataclasses import replace

from minisandbox.models import Model, ModelOptions
from minisandbox.rollouts import Budgets, Setup
from minisandbox.rollouts.cluster import Cluster, ClusterRollouts, NodeReport
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

POLICY = "policy"
"""The name of the trained model on the nodes."""
_ENDING = 10.0


class TrainingNodes:
    """The nodes of a cluster, as :class:`.Machines`.

    The engine is served at this machine's address, protected by a key that is generated for this run and sent to the
    nodes. It samples with the step's weights, and is paused while they change.

    Args:
        cluster: the cluster; its ``model`` is ignored.
        gradings: concurrent gradings per node; the number of its CPUs if None.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, cluster: Cluster, gradings: int | None = None) -> None:
        cluster.check()
        self._budgets = None if gradings is None else Budgets(gradings=gradings)
        self._cluster = cluster
        self._server: _Server | None = None
        self._rollouts: ClusterRollouts | None = None

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost ones."""
        return () if self._rollouts is None else self._rollouts.reports

    def open(self, setup: Setup) -> None:
        """Join the cluster and serve the setup's model; further calls do nothing.

        Raises:
            MissingExtra: Ray is not installed.
            HostError: there is no such cluster.
        """
        if self._rollouts is not None:
            return
        cluster = self._cluster
        if setup.model is not None:
            from minisandbox.rollouts.cluster.on_ray import connect, own_address  # noqa: PLC0415 - only clusters need Ray

            connect(cluster.address)
            self._server = _Server(setup.model, own_address())
            options = ModelOptions(POLICY, self._server.base_url, tokens="yes")
            cluster = replace(cluster, model=options, api_key=self._server.key)
        self._rollouts = ClusterRollouts(cluster, setup, self._budgets)

    async def rollout(self, task: Task, attempt: int, setup: Setup, seed: int) -> Trajectory:
        """Run a rollout on a node."""
        assert self._rollouts is not None
        return await self._rollouts.rollout(task, attempt=attempt, draw=Draw(setup.sampling, seed))

    def close(self) -> None:
        """Leave the cluster and stop the server; further calls do nothing."""
        if self._rollouts is not None:
            self._rollouts.close()
        if self._server is not None:
            self._server.close()


class _Server:
    """An HTTP server for an engine, on its own thread, since the trainer's event loop does not run during training."""

    def __init__(self, model: Model, host: str) -> None:
        from minisandbox.models.engine import EngineServer  # noqa: PLC0415 - an extra

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
