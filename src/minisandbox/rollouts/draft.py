"""A trajectory while it comes about."""

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
from minisandbox.trajectories import Failure, StepRecord, Timings, Trajectory, TurnRecord

EXIT_ENVIRONMENT_ERROR = "exit_environment_error"
"""The exit status of a rollout whose sandbox failed."""


class Draft:
    """What is known of a rollout so far.

    Attributes:
        task: the task.
        setup: how it is done.
        attempt: which rollout of the task it is.
        ending: how the agent ended.
        submission: its patch, or None as long as there is none.
        failure: what kept it from being finished, or None.
        error: the exception behind that.
        session: what the agent works with, once it does.
        tries: what earlier tries failed at.

    Args:
        task: the task.
        image: the image's name and key.
        setup: how it is done.
        attempt: which rollout of the task it is.
        tries: what earlier tries failed at.
        waited: seconds that are known already, by the names of :class:`.Timings`.
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
        """Whether the model has answered at all."""
        return self.session is not None and bool(self.session.record.turns)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; the names are those of :class:`.Timings`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - began

    def fail(self, phase: str, error: Exception, *, exit_status: str = EXIT_ENVIRONMENT_ERROR) -> None:
        """Record what kept the rollout from being finished.

        Args:
            phase: where, by the names of :class:`.Failure`.
            error: what.
            exit_status: how the agent ended by it.
        """
        self.error = error
        self.failure = Failure(phase, type(error).__name__, str(error))
        self.ending = Ending(exit_status, str(error))

    def trajectory(self, graded: Grade | None) -> Trajectory:
        """Return the record. It takes a while where there are many tokens: not for the event loop's thread.

        Args:
            graded: the grade, or None where grading was not reached.
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
    one = turn.completion
    return TurnRecord(turn.message, turn.began, one.seconds, one.tries, one.usage, one.finish_reason, one.cost)
