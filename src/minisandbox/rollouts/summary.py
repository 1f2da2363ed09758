"""Summaries of rollouts, which a batch keeps in memory and a run's database stores in columns."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisandbox.grade import Verdict
from minisandbox.models import TokenUsage
from minisandbox.trajectories import Timings, Trajectory


@dataclass(frozen=True, slots=True)
class Summary:
    """The result and the metrics of an ended rollout, without its conversation.

    Attributes:
        instance_id: the task's id.
        attempt: the index of the rollout among the task's rollouts, from 0.
        exit_status: why the agent stopped, in SWE-agent's terms: ``submitted``, ``exit_cost`` or another.
        verdict: the grade's verdict, or None if the rollout ended before grading.
        reason: the grade's reason, or the kind of failure.
        detail: a sentence that explains the reason.
        timings: the duration of each phase.
        resumed: whether the rollout finished before this batch began.
        reward: 1.0, 0.0, or None after an infrastructure error or unconfirmed pass.
        failed_in: the phase with an infrastructure error, or "".
        tries: the number of tries.
        turns: the number of the model's responses.
        steps: the number of commands.
        usage: the token counts of all responses together.
        cost: the cost of all responses in US dollars.
        agent: the agent's name.
        model: the model's name.
        started: the start time, UTC in ISO 8601.
        flags: the kinds of the grade's flags that concern the submission, separated by ", ".
    """

    instance_id: str
    attempt: int
    exit_status: str
    verdict: Verdict | None
    reason: str
    detail: str
    timings: Timings
    resumed: bool = False
    reward: float | None = None
    failed_in: str = ""
    tries: int = 1
    turns: int = 0
    steps: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    cost: float = 0.0
    agent: str = ""
    model: str = ""
    started: str = ""
    flags: str = ""

    @property
    def finished(self) -> bool:
        """Whether the rollout has a reward. Infrastructure errors and unconfirmed passes have no reward."""
        return self.reward is not None

    @classmethod
    def of(cls, trajectory: Trajectory, *, resumed: bool = False) -> Summary:
        """Return the summary of a trajectory.

        Args:
            trajectory: the rollout's record.
            resumed: whether the rollout finished before this batch.
        """
        graded, failure = trajectory.grade, trajectory.failure
        reason, detail = (failure.kind, failure.detail) if failure else ("", trajectory.detail)
        return cls(
            trajectory.instance_id,
            trajectory.attempt,
            trajectory.exit_status,
            graded.verdict if graded else None,
            graded.reason if graded else reason,
            graded.detail if graded else detail,
            trajectory.timings,
            resumed,
            trajectory.reward,
            failure.phase if failure else "",
            len(trajectory.tries) + 1,
            len(trajectory.turns),
            len(trajectory.steps),
            trajectory.usage,
            trajectory.cost,
            trajectory.agent,
            trajectory.model,
            trajectory.started,
            ", ".join(sorted({flag.kind for flag in graded.flags if flag.is_suspicious})) if graded else "",
        )
