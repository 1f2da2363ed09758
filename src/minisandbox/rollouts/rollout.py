"""One rollout: a sandbox, an agent in it, its submission, and the grade of that in another sandbox."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from minisandbox import __version__
from minisandbox.agents import EXIT_ERROR, Agent, AgentResult, Step
from minisandbox.errors import CommandFailed, FileAccessError, HostError, InvalidValue, MiniSandboxError, SandboxGone
from minisandbox.grade import MAX_SUBMISSION, Grade, grade
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task
from minisandbox.trajectories import Failure, StepRecord, Timings, Trajectory
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

EXIT_ENVIRONMENT_ERROR = "exit_environment_error"
"""The exit status of a rollout whose sandbox failed."""


def rollout(
    task: Task,
    image: Image,
    agent: Agent,
    *,
    attempt: int = 0,
    limits: Limits | None = None,
    timeout: float | None = None,
) -> Trajectory:
    """Let an agent work on a task once, and grade what it submits.

    The agent's sandbox has ended, with every process in it, before grading begins.

    Args:
        task: the task.
        image: its image.
        agent: the agent.
        attempt: which rollout of this task it is.
        limits: what each of the two sandboxes may use.
        timeout: seconds the tests may take; the task's own if None.

    Returns:
        The record. Whatever fails on our side is in its ``failure``; then ``finished`` is False.
    """
    draft = _Draft(task, image.name, image.key, agent.name, attempt)
    submission = _work(task, image, agent, limits, draft)
    if submission is None:
        return draft.trajectory(None, None)
    with draft.phase("grade"):
        graded = _grade(task, image, submission, limits, timeout, draft)
    return draft.trajectory(submission, graded)


def unreached(task: Task, agent: Agent, attempt: int, error: Exception) -> Trajectory:
    """Return the record of a rollout that could not begin because there is no image."""
    draft = _Draft(task, "", "", agent.name, attempt)
    draft.fail("image", error)
    return draft.trajectory(None, None)


def _work(task: Task, image: Image, agent: Agent, limits: Limits | None, draft: _Draft) -> bytes | None:
    """Run the agent in a sandbox; returns its submission, or None where our side failed (the draft says how)."""
    try:
        with draft.phase("sandbox_ready"):
            box = Sandbox.create(image.spec(), limits=limits)
    except (MiniSandboxError, OSError) as error:
        draft.fail("sandbox", error)
        return None
    submission: bytes | None = None
    try:
        with box:
            with draft.phase("agent"):
                went_on = _run_agent(task, box, agent, draft)
            if went_on:
                with draft.phase("patch"):
                    submission = _take_patch(box, draft)
    except SandboxGone as error:  # it would not end: its processes may still be alive, so that nothing is graded
        draft.fail("sandbox", error)
        return None
    return submission


def _run_agent(task: Task, box: Sandbox, agent: Agent, draft: _Draft) -> bool:
    try:
        draft.result = agent.run(task, box)
    except (HostError, SandboxGone) as error:
        draft.fail("agent", error)
    except Exception as error:  # noqa: BLE001 - agents are plugged in from outside; one that breaks must not end a batch
        draft.fail("agent", error, exit_status=EXIT_ERROR)
    else:
        return True
    return False


def _take_patch(box: Sandbox, draft: _Draft) -> bytes | None:
    try:
        return box.patch("/testbed", limit=MAX_SUBMISSION)
    except (CommandFailed, FileAccessError) as error:  # it worked when the image was made: the agent's doing
        draft.result = replace(draft.result, exit_status=EXIT_ERROR, detail=f"no patch could be taken: {error}")
        return b""
    except (MiniSandboxError, OSError) as error:
        draft.fail("patch", error)
        return None


def _grade(
    task: Task, image: Image, submission: bytes, limits: Limits | None, timeout: float | None, draft: _Draft
) -> Grade | None:
    try:
        graded = grade(task, image, submission, timeout=timeout, limits=limits)
    except InvalidValue as error:  # a task that cannot be graded: its row is wrong, and a batch goes on without it
        draft.failure = Failure("grade", type(error).__name__, str(error))
        return None
    if graded.resolved is None:
        draft.failure = Failure("grade", graded.reason, graded.detail)
    return graded


@dataclass(slots=True)
class _Draft:
    """A trajectory while it comes about."""

    task: Task
    image: str
    image_key: str
    agent: str
    attempt: int
    result: AgentResult = field(default_factory=AgentResult)
    failure: Failure | None = None
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _began: float = field(default_factory=time.monotonic)
    _seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; the names are those of :class:`Timings`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - began

    def fail(self, phase: str, error: Exception, *, exit_status: str = EXIT_ENVIRONMENT_ERROR) -> None:
        """Record what kept the rollout from being finished."""
        self.failure = Failure(phase, type(error).__name__, str(error))
        self.result = replace(self.result, exit_status=exit_status, detail=str(error))

    def trajectory(self, submission: bytes | None, graded: Grade | None) -> Trajectory:
        return Trajectory(
            instance_id=self.task.instance_id,
            attempt=self.attempt,
            agent=self.agent,
            image=self.image,
            image_key=self.image_key,
            started=self.started,
            minisandbox=__version__,
            exit_status=self.result.exit_status,
            detail=self.result.detail,
            steps=tuple(_record(step) for step in self.result.steps),
            submission=submission,
            grade=graded,
            failure=self.failure,
            timings=Timings(**self._seconds, total=time.monotonic() - self._began),
        )


def _record(step: Step) -> StepRecord:
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
    )
