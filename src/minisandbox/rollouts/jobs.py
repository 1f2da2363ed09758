"""Define jobs: one rollout or check each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.runs import Job as Check
from minisandbox.runs import Result
from minisandbox.tasks import Task

if TYPE_CHECKING:
    from minisandbox.images import Image

Key: TypeAlias = tuple[str, int]
"""The id of a job's task and the attempt."""

STAGES = ("queued", "image", "sandbox", "agent", "grade", "ended")
"""The stages of a job, in order."""

Outcome: TypeAlias = Packed | Result | None
"""The record of a rollout, or the result of a check; None if an earlier result of the check is still valid."""


@dataclass(slots=True, eq=False)
class Job:
    """A pending or running rollout, or a check (the validation or evaluation of a task) on a cluster node.

    Attributes:
        task: the task.
        attempt: the index of the rollout among the task's rollouts, from 0.
        since: the time at which the job began to wait, from :func:`time.monotonic`.
        draw: sampling options for this rollout only; None for the options of the setup.
        check: the check; None for a rollout.
        earlier: the fingerprint of an earlier result of the check. If it is unchanged, the check is skipped.
        image: the task's image; None until the image is ready.
        image_seconds: seconds spent waiting for the image.
        stage: the current stage, from :data:`STAGES`.
        dropped: whether the job was cancelled, so that it need not start.
        retried: whether the job has been run again after an infrastructure error of its node or a missing image.
    """

    task: Task
    attempt: int
    since: float = field(default_factory=time.monotonic)
    draw: Draw | None = None
    check: Check[Task] | None = None
    earlier: str | None = None
    image: Image | None = None
    image_seconds: float = 0.0
    stage: str = "queued"
    dropped: bool = False
    retried: bool = False

    @property
    def key(self) -> Key:
        """The task's id and the attempt."""
        return self.task.instance_id, self.attempt

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the job for another node, whose clock differs: how long it has waited, and no state of this node."""
        waited = time.monotonic() - self.since
        return _unpickled, (waited, self.task, self.attempt, self.draw, self.check, self.earlier)


def _unpickled(
    waited: float, task: Task, attempt: int, draw: Draw | None, check: Check[Task] | None, earlier: str | None
) -> Job:
    return Job(task, attempt, time.monotonic() - waited, draw, check, earlier)
