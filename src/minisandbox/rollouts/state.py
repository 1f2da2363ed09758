"""Collect the state of a running rollout, and build its trajectory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from minisandbox import __version__
from minisandbox.agents import Ending, Record, Session, Step, Turn
from minisandbox.grade import Grade
from minisandbox.rollouts.setup import Setup
from minisandbox.tasks import Task
from minisandbox.trajectories import Failure, PatchRecord, StepRecord, Timings, Trajectory, TurnRecord

EXIT_ENVIRONMENT_ERROR = "exit_environment_error"
"""The exit status after an infrastructure error of the sandbox."""


class RolloutState:
    """The state of a running rollout.

    Attributes:
        task: the task.
        setup: the agent, its model, and limits.
        attempt: the index of the rollout among the task's rollouts, from 0.
        ending: how the agent ended.
        submission: the agent's patch; None until the patch is taken.
        grade: the grade if the task was graded in the agent's own sandbox, else None.
        failure: the infrastructure error that prevented the rollout from finishing, or None.
        error: the exception that caused ``failure``.
        session: the agent's session; None until the agent starts.
        tries: the infrastructure errors of earlier tries.

    Args:
        task: the task.
        image: the image's name and key.
        setup: the agent, its model, and limits.
        attempt: the index of the rollout among the task's rollouts, from 0.
        tries: the infrastructure errors of earlier tries.
        waited: seconds spent before this try, by field of :class:`.Timings`.
    """

    def __init__(
        self,
        task: Task,
        image: tuple[str, str],
        setup: Setup,
        attempt: int,
        *,
        tries: tuple[Failure, ...] = (),
        waited: dict[str, float] | None = None,
    ) -> None:
        self.task = task
        self.setup = setup
        self.attempt = attempt
        self.ending = Ending()
        self.submission: bytes | None = None
        self.grade: Grade | None = None
        self.failure: Failure | None = None
        self.error: Exception | None = None
        self.session: Session | None = None
        self._image = image
        self.tries = tries
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._began = time.monotonic()
        self._seconds: dict[str, float] = dict(waited or {})

    @property
    def answered(self) -> bool:
        """Whether the model has responded at least once."""
        return self.session is not None and bool(self.session.record.turns)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a phase, which is named after a field of :class:`.Timings`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - began

    def fail(self, phase: str, error: Exception, *, exit_status: str = EXIT_ENVIRONMENT_ERROR) -> None:
        """Record an infrastructure error.

        Args:
            phase: the phase that failed, as in :class:`.Failure`.
            error: the exception.
            exit_status: the agent's exit status.
        """
        self.error = error
        self.failure = Failure(phase, type(error).__name__, str(error))
        self.ending = Ending(exit_status, str(error))

    def trajectory(self, graded: Grade | None) -> Trajectory:
        """Return the rollout's record. This is slow for many tokens, so do not call it on the event loop.

        Args:
            graded: the grade, or None if grading was not reached.
        """
        record = Record() if self.session is None else self.session.record
        seconds = {
            **self._seconds,
            "model": sum(turn.completion.seconds for turn in record.turns),
            "commands": sum(step.result.duration for step in record.steps),
            "total": time.monotonic() - self._began,
        }
        return Trajectory(
            instance_id=self.task.instance_id,
            attempt=self.attempt,
            agent=self.setup.agent.name,
            image=self._image[0],
            image_key=self._image[1],
            started=self._started,
            minisandbox=__version__,
            exit_status=self.ending.exit_status,
            detail=self.ending.detail,
            steps=tuple(map(_step, record.steps)),
            submission=self.submission,
            grade=graded,
            failure=self.failure,
            timings=Timings(**seconds),
            model=self.setup.model_name,
            sampling=self.setup.sampling_table(),
            configuration=self.setup.configuration,
            messages=tuple(record.messages),
            turns=tuple(map(_turn, record.turns)),
            rows=record.rows(),
            tries=self.tries,
            patches=tuple(PatchRecord(entry.turn, entry.patch, entry.detail) for entry in record.patches),
        )


def _step(step: Step) -> StepRecord:
    result = step.result
    return StepRecord(
        step.command,
        result.outcome.value,
        result.exit_code,
        result.signal,
        result.stdout_bytes,
        result.stderr_bytes,
        result.dropped_stdout,
        result.dropped_stderr,
        result.duration,
        step.turn,
        step.began,
        step.stateful,
    )


def _turn(turn: Turn) -> TurnRecord:
    completion = turn.completion
    return TurnRecord(
        turn.message,
        turn.began,
        completion.seconds,
        completion.tries,
        completion.usage,
        completion.finish_reason,
        completion.cost,
        turn.queued,
    )
