"""Run rollouts and checks that are submitted one by one, for trainers and validations, on this machine or a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import closing, suppress
from typing import Self

from minisandbox.agents import EmptyAgent
from minisandbox.errors import HostError, InvalidValue
from minisandbox.models import Model, TokenRow
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster import Cluster, NodeReport
from minisandbox.rollouts.database import Packed, unpack
from minisandbox.rollouts.executor import Crew, Executor
from minisandbox.rollouts.jobs import Job, Key, Outcome
from minisandbox.rollouts.setup import Draw, ImageOf, Setup
from minisandbox.runs import Job as Check
from minisandbox.runs import Result
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

_ENDING = 60.0
_CLOSED = "the runner is closed"


class JobThread:
    """Run jobs on a separate thread and event loop, so that they continue while the caller blocks in an optimiser step.

    Args:
        crew: runs the jobs.
        model: the model to close with the crew, on the same thread, because its connections belong to the event loop.
    """

    def __init__(self, crew: Crew, model: Model | None = None) -> None:
        self._crew, self._model = crew, model
        self._pending: dict[Key, asyncio.Future[Outcome]] = {}
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._live, name="rollouts", daemon=True)
        self._fault: Exception | None = None
        self._thread.start()

    def submit(self, job: Job) -> Future[Outcome]:
        """Submit a job, and return a future of its outcome. Cancelling the future drops the job.

        Args:
            job: the job, whose key must differ from the keys of all pending jobs.

        Raises:
            HostError: the thread has stopped.
        """
        running = self._run(job)
        try:
            return asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError as error:  # the loop is closed
            running.close()
            raise HostError(_CLOSED, reason=str(self._fault or error)) from error

    def close(self) -> None:
        """Stop all jobs and release the crew; further calls do nothing."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(_ENDING)

    # --- called on the thread ----------------------------------------------------------------------------------------

    async def ended(self, job: Job, outcome: Outcome) -> None:
        """Pass the outcome to the job's future."""
        if (future := self._pending.pop(job.key, None)) is not None and not future.done():
            future.set_result(outcome)

    def stop_with(self, error: Exception) -> None:
        """Fail all pending jobs."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)

    async def _run(self, job: Job) -> Outcome:
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._pending[job.key] = future
        try:
            self._crew.put([job])
            return await future
        finally:
            if self._pending.get(job.key) is future:  # cancelled, or failed with all jobs
                del self._pending[job.key]
                self._crew.forget(job)

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as errors:  # a bug here or in Ray: fail the pending futures with it
            self._fault = HostError("rollouts cannot be run", reason=str(errors.exceptions[0]))
        finally:
            self.stop_with(self._fault or HostError(_CLOSED))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        try:
            await self._crew.serve(self)
        finally:
            await self._crew.close()
            if self._model is not None:
                await self._model.close()


class RolloutThread:
    """Run rollouts that a trainer submits one by one. Use this class in a ``with`` block.

    Images and sandboxes stay ready between training steps. The rollouts run on a separate thread, so they continue
    while the optimiser blocks the caller's event loop. As in a batch, ``budgets`` limits concurrent agents, sandboxes,
    gradings and builds.

    Args:
        setup: the agent, its model, and limits. Without a cluster, the thread uses the model, and finally closes it.
        cluster: the cluster whose nodes run the rollouts; None for this machine.
        image_of: returns a task's image; called in several threads. Nodes of a cluster build the images instead.
        budgets: concurrency limits; with a cluster, per node, except ``workers`` and ``builds``, which the node sets.
        tries: maximum tries of a rollout; infrastructure errors are retried.
        pause: seconds before the second try.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        cluster: Cluster | None = None,
        image_of: ImageOf | None = None,
        budgets: Budgets | None = None,
        tries: int = 3,
        pause: float = 1.0,
    ) -> None:
        budgets = budgets or Budgets()
        crew: Crew = (
            Executor(setup, budgets, image_of=image_of, tries=tries, pause=pause)
            if cluster is None
            else cluster.crew(setup, budgets, tries=tries, pause=pause)
        )
        self._thread = JobThread(crew, setup.model if cluster is None else None)
        self._jobs: set[Job] = set()

    async def rollout(self, task: Task, *, attempt: int = 0, draw: Draw | None = None) -> Trajectory:
        """Run one rollout. Cancellation drops the rollout; without a cluster, its agent is stopped at once.

        Args:
            task: the task.
            attempt: the index of the rollout among the task's rollouts. Pending rollouts must have different indices.
            draw: sampling options of this rollout only.

        Returns:
            The record. After an infrastructure error, ``failure`` contains the error, and ``finished`` is False.

        Raises:
            HostError: no node of the cluster can run the program's rollouts.
            ModelRefused: the model's server rejects the request.
            BudgetExceeded: the model's budget is spent.
        """
        packed = await self.packed(task, attempt=attempt, draw=draw)
        return await asyncio.to_thread(unpack, packed.trajectory, name=f"{task.instance_id}, attempt {attempt}")

    async def packed(self, task: Task, *, attempt: int = 0, draw: Draw | None = None) -> Packed:
        """Run one rollout like :meth:`rollout`, but return its record in the form that a run directory stores."""
        job = Job(task, attempt, draw=draw)
        self._jobs.add(job)
        try:
            packed = await asyncio.wrap_future(self._thread.submit(job))
        finally:
            self._jobs.remove(job)
        assert isinstance(packed, Packed)
        return packed

    @property
    def testing(self) -> int:
        """Number of rollouts whose submissions are graded or wait for it; 0 with a cluster."""
        return sum(job.stage == "grade" for job in list(self._jobs))

    def close(self) -> None:
        """Stop all rollouts and leave the cluster; further calls do nothing."""
        self._thread.close()

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the thread."""
        self.close()


class RolloutStream:
    """A stream of token rows from rollouts as they finish, without rows that are too old to train on.

    The trainer increments ``version`` after each optimiser step, while rollouts continue. A row is as old as its oldest
    sampled token. If the engine does not report the policy version of each token, the version at submission counts,
    because the engine's weights are at least as new.

    Attributes:
        version: the trainer's policy version.
        dropped: the number of rows that were dropped because they were too old.

    Args:
        thread: runs the rollouts.
        staleness: the maximum number of policy versions that a row may lag behind the trainer.
        version: the policy version at the start.

    Raises:
        InvalidValue: ``staleness`` is negative.
    """

    def __init__(self, thread: RolloutThread, staleness: int, version: int = 0) -> None:
        if staleness < 0:
            raise InvalidValue(f"staleness is {staleness}", hint="give 0 or more versions")
        self.version, self.dropped = version, 0
        self._thread, self._staleness = thread, staleness
        self._pending: dict[asyncio.Task[Trajectory], int] = {}

    def __len__(self) -> int:
        """Return the number of submitted rollouts that :meth:`next` has not returned yet."""
        return len(self._pending)

    def submit(self, task: Task, *, attempt: int = 0, draw: Draw | None = None) -> None:
        """Submit a rollout; the arguments are those of :meth:`RolloutThread.rollout`."""
        running = asyncio.ensure_future(self._thread.rollout(task, attempt=attempt, draw=draw))
        self._pending[running] = self.version

    async def next(self) -> tuple[Trajectory, tuple[TokenRow, ...]]:
        """Wait for a rollout to finish; return its record, and its rows that carry loss and are fresh enough.

        Raises:
            InvalidValue: no rollout is pending.
            MiniSandboxError: the rollout could not be run (:meth:`RolloutThread.rollout`).
        """
        if not self._pending:
            raise InvalidValue("no rollout is pending", hint="submit() one first")
        finished, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        running = next(task for task in self._pending if task in finished)  # the earliest submission
        submitted = self._pending.pop(running)
        rollout = running.result()
        rows = [row for row in rollout.rows if any(row.mask)]
        fresh = tuple(row for row in rows if self._is_fresh(row, submitted))
        self.dropped += len(rows) - len(fresh)
        return rollout, fresh

    def close(self) -> None:
        """Cancel the pending rollouts."""
        for running in self._pending:
            running.cancel()
        self._pending.clear()

    def _is_fresh(self, row: TokenRow, submitted: int) -> bool:
        oldest = row.oldest_version
        return (submitted if oldest is None else oldest) >= self.version - self._staleness


class ClusterChecks:
    """Run validations and evaluations on cluster nodes, as the ``elsewhere`` of :func:`.run_validations`.

    Args:
        cluster: the cluster.
        workers: maximum concurrent tasks per node; None for the node's number of CPUs.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, cluster: Cluster, workers: int | None = None) -> None:
        cluster.check()
        self._cluster, self._workers = cluster, workers

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost nodes."""
        return self._cluster.reports

    def __call__(
        self, jobs: Sequence[Check[Task]], fingerprints: Mapping[str, str]
    ) -> Iterator[tuple[str, Result | None]]:
        """Run checks on the nodes, as :class:`.Elsewhere` describes.

        Raises:
            HostError: there is no such cluster, or none of its nodes can run the checks.
        """
        budgets = Budgets() if self._workers is None else Budgets(gradings=self._workers)
        ids: dict[Future[Outcome], str] = {}
        with closing(JobThread(self._cluster.crew(Setup(agent=EmptyAgent()), budgets, checks=True))) as thread:
            for check in jobs:
                if check.task is not None:
                    job = Job(check.task, 0, check=check, earlier=fingerprints.get(check.id))
                    ids[thread.submit(job)] = check.id
            for future in as_completed(ids):
                result = future.result()
                assert not isinstance(result, Packed)
                yield ids[future], result
