"""Submit rollouts and checks to a cluster one by one, from any thread, for trainers and validations."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeAlias

from minisandbox.agents import EmptyAgent
from minisandbox.errors import HostError
from minisandbox.pool import Job as Check
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.fleet import Fleet, NodeReport
from minisandbox.rollouts.cluster.joining import Cluster
from minisandbox.rollouts.cluster.node import Checked
from minisandbox.rollouts.cluster.workloads import CheckWorkload, Done, RolloutWorkload
from minisandbox.rollouts.database import Packed, unpack
from minisandbox.rollouts.jobs import Job
from minisandbox.rollouts.setup import Draw, Setup
from minisandbox.store.results import Result
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

_Ended: TypeAlias = "queue.SimpleQueue[tuple[str, Future[Checked]]]"
_ENDING = 60.0


class FleetThread(Generic[Done]):
    """Runs a fleet on its own thread and event loop, so that callers may block, during an optimiser step for example.

    Args:
        fleet: the nodes.
    """

    def __init__(self, fleet: Fleet[Done]) -> None:
        self._fleet = fleet
        self._wanted: dict[tuple[str, int], Future[Done]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="cluster", daemon=True)
        self._ended: Exception | None = None
        self._thread.start()

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost ones."""
        return self._fleet.reports

    def submit(self, job: Job) -> Future[Done]:
        """Submit a job; cancelling the future drops it.

        Args:
            job: the job; no other pending job has its key.

        Raises:
            HostError: the fleet has stopped.
        """
        future: Future[Done] = Future()

        def drop(_: Future[Done]) -> None:
            if future.cancelled():
                with suppress(HostError):  # the fleet has stopped already
                    self._call(self._drop, job.key)

        future.add_done_callback(drop)
        self._call(self._put, job, future)
        return future

    def close(self) -> None:
        """Stop the nodes' work and leave the cluster; further calls do nothing."""
        if self._thread.is_alive():
            with suppress(HostError):
                self._call(self._stop)
            self._thread.join(_ENDING)

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # --- on its thread -----------------------------------------------------------------------------------------------

    async def ended(self, job: Job, done: Done) -> None:
        """Pass the result to the job's future."""
        future = self._wanted.pop(job.key, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(done)

    def stop_with(self, error: Exception) -> None:
        """Fail all pending jobs."""
        for key in list(self._wanted):
            self._refuse(key, error)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:  # the loop is closed
            raise HostError("the cluster's nodes are no longer in use", reason=str(self._ended or error)) from error

    def _stop(self) -> None:
        self._serving.cancel()

    def _put(self, job: Job, future: Future[Done]) -> None:
        if not future.cancelled():
            self._wanted[job.key] = future
            self._fleet.put([job])

    def _drop(self, key: tuple[str, int]) -> None:
        self._wanted.pop(key, None)
        self._fleet.forget(key)

    def _refuse(self, key: tuple[str, int], error: Exception) -> None:
        future = self._wanted.pop(key)
        self._fleet.forget(key)
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._serving = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as errors:  # a bug of ours or of Ray's: pending futures fail with it
            self._ended = HostError("the cluster's nodes cannot be used", reason=str(errors.exceptions[0]))
        finally:
            self.stop_with(self._ended or HostError("the cluster's nodes are no longer in use"))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        try:
            await self._fleet.serve(self)
        finally:
            await self._fleet.close()


class ClusterRollouts:
    """Rollouts on a cluster's nodes, submitted one by one, for trainers. Use it in a ``with`` block.

    The nodes build the images. If this process uses Ray already, its cluster is used.

    Args:
        cluster: the cluster, and the model of its nodes.
        setup: the agent, its model, and limits.
        budgets: concurrency limits of each node, which sets ``workers`` and ``builds`` itself.
        tries: most tries of a rollout, repeated after infrastructure errors.
        pause: seconds before the second try.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster.
    """

    def __init__(
        self, cluster: Cluster, setup: Setup, budgets: Budgets | None = None, *, tries: int = 3, pause: float = 1.0
    ) -> None:
        workload = RolloutWorkload(setup, cluster.budget)
        fleet = cluster.fleet(workload, setup, budgets or Budgets(), tries=tries, pause=pause)
        self._thread: FleetThread[Packed] = FleetThread(fleet)

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost ones."""
        return self._thread.reports

    async def rollout(self, task: Task, *, attempt: int = 0, draw: Draw | None = None) -> Trajectory:
        """Run one rollout. Cancellation drops it: a node may still finish it, and its result is discarded.

        Args:
            task: the task.
            attempt: which rollout of the task it is; pending ones must differ.
            draw: sampling of this rollout alone, if any.

        Returns:
            The record. Infrastructure errors are in its ``failure``; then ``finished`` is False.

        Raises:
            HostError: no node of the cluster works for us.
            ModelRefused: the model's server rejects the request.
            BudgetExceeded: the model's budget is used up.
        """
        packed = await asyncio.wrap_future(self._thread.submit(Job(task, attempt, draw=draw)))
        name = f"{task.instance_id}, attempt {attempt}"
        return await asyncio.to_thread(unpack, packed.trajectory, name=name)

    def close(self) -> None:
        """Stop the nodes' work and leave the cluster; further calls do nothing."""
        self._thread.close()

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class ClusterChecks:
    """Validations and evaluations on a cluster's nodes: the ``elsewhere`` of :func:`.run_validations`.

    Args:
        cluster: the cluster.
        workers: tasks at once on each node; the number of its CPUs if None.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, cluster: Cluster, workers: int | None = None) -> None:
        cluster.check()
        self._cluster, self._workers = cluster, workers
        self.reports: tuple[NodeReport, ...] = ()

    def __call__(
        self, jobs: Sequence[Check[Task]], fingerprints: Mapping[str, str]
    ) -> Iterator[tuple[str, Result | None]]:
        """Run checks on the nodes, as :class:`.Elsewhere` describes.

        Raises:
            HostError: there is no such cluster, or none of its nodes works for us.
        """
        tasks = {job.id: job.task for job in jobs if job.task is not None}
        workload = CheckWorkload({job.id: job for job in jobs}, fingerprints)
        budgets = Budgets() if self._workers is None else Budgets(gradings=self._workers)
        ended: _Ended = queue.SimpleQueue()

        with FleetThread(self._cluster.fleet(workload, Setup(agent=EmptyAgent()), budgets)) as thread:
            for name, task in tasks.items():
                thread.submit(Job(task, 0)).add_done_callback(partial(_note, ended, name))
            for _ in tasks:
                name, future = ended.get()
                yield name, future.result().result
            self.reports = thread.reports


def _note(ended: _Ended, name: str, future: Future[Checked]) -> None:
    ended.put((name, future))
