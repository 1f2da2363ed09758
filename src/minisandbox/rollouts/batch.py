"""Batches: many rollouts at once, resumable, and interruptible without losing what is finished."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.agents import Agent
from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.grade import Verdict
from minisandbox.rollouts.rollout import rollout, unreached
from minisandbox.rollouts.rundir import Config, RunDirectory
from minisandbox.tasks import Task
from minisandbox.trajectories import Timings, Trajectory
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image


@dataclass(frozen=True, slots=True)
class Summary:
    """What a batch keeps in memory of a rollout.

    Attributes:
        instance_id: the task's id.
        attempt: which rollout of this task.
        exit_status: why the agent ended, in the field's words.
        verdict: of its grade, or None where grading was not reached.
        reason: of its grade, or the kind of failure.
        detail: the same in a sentence.
        timings: where the time went.
        path: the trajectory's file.
        resumed: whether it was finished before this batch began.
    """

    instance_id: str
    attempt: int
    exit_status: str
    verdict: Verdict | None
    reason: str
    detail: str
    timings: Timings
    path: Path
    resumed: bool

    @property
    def finished(self) -> bool:
        """Whether there is a verdict about the agent's work."""
        return self.verdict not in {None, Verdict.INFRA_ERROR}


@dataclass(frozen=True, slots=True)
class Progress:
    """What a batch tells while it goes on.

    Attributes:
        done: rollouts that have ended, those of earlier batches included.
        total: rollouts of the whole batch.
        latest: the one that ended just now.
    """

    done: int
    total: int
    latest: Summary


def run_batch(
    tasks: Iterable[Task],
    agent: Agent,
    out: Path,
    *,
    image_of: Callable[[Task], Image],
    attempts: int = 1,
    workers: int = 1,
    limits: Limits | None = None,
    timeout: float | None = None,
    config: Config | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Summary, ...]:
    """Run rollouts of one agent over tasks, several at once, and keep each in a run directory as it ends.

    The same call again goes on where it was cut off: finished rollouts are skipped, failed ones are done again.
    Ctrl-C ends the call at once; rollouts under way are given up, finished ones are on disk.

    Args:
        tasks: the tasks.
        agent: the agent; several threads use it at once.
        out: the run directory.
        image_of: returns a task's image; called by several threads at once.
        attempts: rollouts per task.
        workers: rollouts at once.
        limits: what each sandbox may use.
        timeout: seconds the tests may take; each task's own if None.
        config: what else describes the run; going on with it needs the same.
        progress: called on this thread for every rollout, those that were finished before included.

    Returns:
        A summary of each rollout, task by task.

    Raises:
        InvalidValue: ``attempts`` or ``workers`` is less than 1.
        RunError: the directory is in use or belongs to another run.
        TrajectoryError: a trajectory in it cannot be read.
        DiskFull: the disk is full; what was finished is kept.
    """
    _check_counts(attempts=attempts, workers=workers)
    jobs = [(task, attempt) for task in tasks for attempt in range(attempts)]
    resolved = {**(config or {}), "agent": agent.name, "attempts": attempts, "workers": workers, "timeout": timeout}
    work = partial(_work, agent=agent, image_of=image_of, limits=limits, timeout=timeout)
    with RunDirectory.open(out, resolved) as run:
        return _Batch(run, len(jobs), progress).carry_out(jobs, work, workers)


def _work(
    task: Task,
    attempt: int,
    *,
    agent: Agent,
    image_of: Callable[[Task], Image],
    limits: Limits | None,
    timeout: float | None,
) -> Trajectory:
    try:
        image = image_of(task)
    except MiniSandboxError as error:
        return unreached(task, agent, attempt, error)
    return rollout(task, image, agent, attempt=attempt, limits=limits, timeout=timeout)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidValue(f"{name} is {count}", hint="give 1 or more")


_Job = tuple[Task, int]
_Work = Callable[[Task, int], Trajectory]


class _Batch:
    """The bookkeeping of one call of :func:`run_batch`."""

    def __init__(self, run: RunDirectory, total: int, progress: Callable[[Progress], None] | None) -> None:
        self._summaries: dict[tuple[str, int], Summary] = {}
        self._run = run
        self._total = total
        self._progress = progress
        self._todo: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Summary | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()

    def carry_out(self, jobs: list[_Job], work: _Work, workers: int) -> tuple[Summary, ...]:
        """Do what no earlier call has finished; returns a summary of every job, in their order."""
        self._finish([job for job in jobs if not self._skip(*job)], work, workers)
        return tuple(self._summaries[task.instance_id, attempt] for task, attempt in jobs)

    def _skip(self, task: Task, attempt: int) -> bool:
        """Take over a rollout that an earlier call finished; returns whether there is one."""
        known = self._run.load(task.instance_id, attempt)
        if known is None or not known.finished:
            return False
        self._note(_summary(known, self._run.file_of(task.instance_id, attempt), resumed=True))
        return True

    def _finish(self, todo: list[_Job], work: _Work, workers: int) -> None:
        """Do what is left. The threads are daemons: a process that was told to end does not wait for their rollouts."""
        for job in todo:
            self._todo.put(job)
        for number in range(min(workers, len(todo))):
            threading.Thread(target=self._serve, args=(work,), name=f"rollouts-{number}", daemon=True).start()
        try:
            for _ in todo:
                ended = self._ended.get()
                if isinstance(ended, BaseException):
                    raise ended
                self._note(ended)
        finally:
            self._stop.set()

    def _serve(self, work: _Work) -> None:
        while not self._stop.is_set():
            try:
                task, attempt = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                trajectory = work(task, attempt)
                if self._stop.is_set() and not trajectory.finished:
                    return  # its sandbox was stopped because the batch was: nothing to keep
                self._ended.put(_summary(trajectory, self._run.write(trajectory), resumed=False))
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread, which raises it
                self._ended.put(error)
                return

    def _note(self, summary: Summary) -> None:
        self._summaries[summary.instance_id, summary.attempt] = summary
        if self._progress is not None:
            self._progress(Progress(len(self._summaries), self._total, summary))


def _summary(trajectory: Trajectory, path: Path, *, resumed: bool) -> Summary:
    graded, failure = trajectory.grade, trajectory.failure
    reason, detail = (failure.kind, failure.detail) if failure else ("", trajectory.detail)
    return Summary(
        trajectory.instance_id,
        trajectory.attempt,
        trajectory.exit_status,
        graded.verdict if graded else None,
        graded.reason if graded else reason,
        graded.detail if graded else detail,
        trajectory.timings,
        path,
        resumed,
    )
