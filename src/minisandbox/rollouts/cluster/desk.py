"""Work on a cluster's nodes that is asked for piece by piece, from any thread: by a trainer, by a validation."""

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
from minisandbox.grade.resumable import Job as Check
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.fleet import Fleet, NodeReport
from minisandbox.rollouts.cluster.joining import Cluster
from minisandbox.rollouts.cluster.node import Checked
from minisandbox.rollouts.cluster.trades import CheckTrade, Done, RolloutTrade
from minisandbox.rollouts.database import Packed, unpack
from minisandbox.rollouts.line import Job
from minisandbox.rollouts.setup import Draw, Setup
from minisandbox.store.results import Result
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

_Ended: TypeAlias = "queue.SimpleQueue[tuple[str, Future[Checked]]]"
_ENDING = 60.0


class Desk(Generic[Done]):
    """Keeps a fleet on an event loop of its own: its caller's may stand still, while an optimiser steps for example.

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
        """What each node has done, those that are gone included."""
        return self._fleet.reports

    def submit(self, job: Job) -> Future[Done]:
        """Have a job done; cancelling the future drops it.

        Args:
            job: what; its key is that of no other that has not ended.

        Raises:
            HostError: it is closed.
        """
        future: Future[Done] = Future()

        def drop(_: Future[Done]) -> None:
            if future.cancelled():
                with suppress(HostError):  # it is over anyway
                    self._call(self._drop, job.key)

        future.add_done_callback(drop)
        self._call(self._put, job, future)
        return future

    def close(self) -> None:
        """End what the nodes do, and leave the cluster. Calling it again does nothing."""
        if self._thread.is_alive():
            with suppress(HostError):
                self._call(self._stop)
            self._thread.join(_ENDING)

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()

    # --- on its thread -----------------------------------------------------------------------------------------------

    async def ended(self, job: Job, done: Done) -> None:
        """Hand it to whoever waits for it."""
        future = self._wanted.pop(job.key, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(done)

    def end_by(self, error: Exception) -> None:
        """Nothing of what is wanted can go on now."""
        for key in list(self._wanted):
            self._refuse(key, error)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:  # the loop is closed
            raise HostError("the cluster's nodes are not used any more", reason=str(self._ended or error)) from error

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
        except BaseExceptionGroup as errors:  # a mistake of ours, or of Ray's: who waits is told
            self._ended = HostError("the cluster's nodes cannot be used", reason=str(errors.exceptions[0]))
        finally:
            self.end_by(self._ended or HostError("the cluster's nodes are not used any more"))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        try:
            await self._fleet.serve(self)
        finally:
            await self._fleet.close()


class ClusterRollouts:
    """Rollouts on a cluster's nodes, one at a time or many, for a trainer. Use it in a ``with`` block.

    Images are made by the nodes. Where this process uses Ray already, its cluster is the one.

    Args:
        cluster: which, and the model that its nodes ask.
        setup: how rollouts are done.
        budgets: of each node; ``workers`` and ``builds`` are what the node offers.
        tries: how often a rollout is tried at most, where it fails on our side.
        pause: seconds before the second try.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster.
    """

    def __init__(
        self, cluster: Cluster, setup: Setup, budgets: Budgets | None = None, *, tries: int = 3, pause: float = 1.0
    ) -> None:
        trade = RolloutTrade(setup, cluster.budget)
        self._desk: Desk[Packed] = Desk(cluster.fleet(trade, setup, budgets or Budgets(), tries=tries, pause=pause))

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """What each node has done, those that are gone included."""
        return self._desk.reports

    async def rollout(self, task: Task, *, attempt: int = 0, draw: Draw | None = None) -> Trajectory:
        """Do one; a cancellation drops it: a node that is at it may finish it, and nobody keeps that.

        Args:
            task: the task.
            attempt: which rollout of this task it is: no two at a time are the same.
            draw: how its answers are drawn, where that is its own.

        Returns:
            The record. Whatever fails on our side is in its ``failure``; then ``finished`` is False.

        Raises:
            HostError: no node works for us.
            ModelRefused: the model's server refuses what it is asked.
            BudgetExceeded: the model's budget is used up.
        """
        packed = await asyncio.wrap_future(self._desk.submit(Job(task, attempt, draw=draw)))
        name = f"{task.instance_id}, attempt {attempt}"
        return await asyncio.to_thread(unpack, packed.trajectory, name=name)

    def close(self) -> None:
        """End what the nodes do, and leave the cluster. Calling it again does nothing."""
        self._desk.close()

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()


class ClusterChecks:
    """Validations and evaluations on a cluster's nodes: ``elsewhere`` of :func:`.run_validations`.

    Args:
        cluster: which.
        workers: tasks at once on each node; by its CPUs if None.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, cluster: Cluster, workers: int | None = None) -> None:
        cluster.check()
        self._cluster, self._workers = cluster, workers
        self.reports: tuple[NodeReport, ...] = ()

    def __call__(self, jobs: Sequence[Check], known: Mapping[str, str]) -> Iterator[tuple[str, Result | None]]:
        """As :class:`.Elsewhere`.

        Raises:
            HostError: there is no such cluster, or no node of it works for us.
        """
        tasks = {job.id: job.task for job in jobs if job.task is not None}
        trade = CheckTrade({job.id: job for job in jobs}, known)
        budgets = Budgets() if self._workers is None else Budgets(gradings=self._workers)
        ended: _Ended = queue.SimpleQueue()

        with Desk(self._cluster.fleet(trade, Setup(agent=EmptyAgent()), budgets)) as desk:
            for name, task in tasks.items():
                desk.submit(Job(task, 0)).add_done_callback(partial(_note, ended, name))
            for _ in tasks:
                name, future = ended.get()
                yield name, future.result().result
            self.reports = desk.reports


def _note(ended: _Ended, name: str, future: Future[Checked]) -> None:
    ended.put((name, future))
