"""Define the trajectory, which is the durable record of one rollout, and its file format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Grade, Verdict
from minisandbox.models import FinishReason, Message, TokenRow, TokenUsage
from minisandbox.trajectories.codec import from_json, to_json
from minisandbox.trajectories.migration import pop_version, upgrade


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One command of an agent and its result.

    Attributes:
        command: a shell command, or an argument list.
        outcome: ``exited``, ``signaled`` or ``timeout``.
        exit_code: the exit status; None if the command did not exit normally.
        signal: the number of the signal that killed the command, or None.
        stdout: the recorded part of stdout.
        stderr: the recorded part of stderr.
        dropped_stdout: the number of bytes of stdout that were not recorded.
        dropped_stderr: the number of bytes of stderr that were not recorded.
        duration: the run time in seconds.
        turn: the number of model responses before the command.
        began: seconds from the start of the agent's loop to the start of the command.
        stateful: whether the command ran in a shell that keeps its state between commands.
    """

    command: str | tuple[str, ...]
    outcome: str
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    dropped_stdout: int
    dropped_stderr: int
    duration: float
    turn: int = 0
    began: float = 0.0
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One response of the model.

    Attributes:
        message: the index of the response in the trajectory's messages; -1 if it is not among them, as for
            side requests of a command-line agent.
        began: seconds from the start of the agent's loop to the first request for the response.
        seconds: seconds from the request to the response, including failed tries.
        tries: the number of requests, including failed requests.
        usage: the token counts.
        finish_reason: why the response ended: ``stop``, ``length`` or ``tool_calls``.
        cost: the cost in US dollars.
        queued: the part of ``seconds`` that the request waited in queues, if the model reports this time.
    """

    message: int
    began: float
    seconds: float
    tries: int
    usage: TokenUsage
    finish_reason: FinishReason
    cost: float
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """The workspace's changes after a turn, recorded only if they differ from the previous record.

    Attributes:
        turn: the number of model responses before this record.
        patch: the changes as a patch; None if no patch could be recorded.
        detail: the reason if no patch could be recorded, else "".
    """

    turn: int
    patch: bytes | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """The duration of each phase of a rollout in seconds; 0.0 for a phase that was not reached.

    Attributes:
        sandbox_ready: from requesting the sandbox until it was ready.
        agent: the agent's loop.
        patch: taking the submission.
        grade: grading the submission.
        total: the whole rollout, including the wait for grading.
        queued: from the start of the batch to the start of the rollout; not included in ``total``.
        image: the part of ``queued`` spent waiting for the image.
        model: the part of ``agent`` spent waiting for the model.
        commands: the part of ``agent`` spent running commands.
    """

    sandbox_ready: float = 0.0
    agent: float = 0.0
    patch: float = 0.0
    grade: float = 0.0
    total: float = 0.0
    queued: float = 0.0
    image: float = 0.0
    model: float = 0.0
    commands: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The infrastructure error that prevented a rollout from finishing. It does not count against the agent.

    Attributes:
        phase: ``image``, ``sandbox``, ``agent``, ``model``, ``patch`` or ``grade``.
        kind: the class name of the error.
        detail: the error message.
    """

    phase: str
    kind: str
    detail: str


VERSION = 4
"""Version of the file format. Increase it with any change that an older reader would misread."""

_FORMAT = "minisandbox-trajectory"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The durable record of one rollout.

    Attributes:
        instance_id: the task's id.
        attempt: the index of the rollout among the task's rollouts, from 0.
        agent: the agent's name.
        image: the name of the sandbox's image.
        image_key: the image's key in the store; empty without an image.
        started: the start time, UTC in ISO 8601.
        minisandbox: the version of MiniSandbox that wrote the record.
        exit_status: why the agent stopped, in SWE-agent's terms: ``submitted``, ``exit_cost`` or another.
        detail: a sentence that explains the exit status, or "".
        steps: the agent's commands.
        submission: the agent's patch, or None if no patch could be taken.
        grade: the grade, or None if the rollout ended before grading.
        failure: the infrastructure error that prevented the rollout from finishing, or None.
        timings: the duration of each phase.
        model: the model's name; empty for an agent without a model.
        sampling: the sampling parameters.
        configuration: the agent's configuration.
        messages: the whole history of the conversation.
        turns: the model's responses, in order.
        rows: the prompt and sampled tokens as training sequences, whose ``turns`` are indices into this record's
            ``turns``; empty if the engine does not report tokens.
        tries: the infrastructure errors that ended earlier tries of this rollout.
        patches: the workspace's changes after each turn that changed it; empty if they were not recorded.
    """

    instance_id: str
    attempt: int
    agent: str
    image: str
    image_key: str
    started: str
    minisandbox: str
    exit_status: str
    detail: str
    steps: tuple[StepRecord, ...]
    submission: bytes | None
    grade: Grade | None
    failure: Failure | None
    timings: Timings
    model: str = ""
    sampling: Mapping[str, object] = field(default_factory=dict)
    configuration: Mapping[str, object] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    rows: tuple[TokenRow, ...] = ()
    tries: tuple[Failure, ...] = ()
    patches: tuple[PatchRecord, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the rollout has a reward. A resumed batch repeats rollouts without a reward."""
        return self.reward is not None

    @property
    def reward(self) -> float | None:
        """1.0 if the submission resolves the task, else 0.0; None after an infrastructure error or unconfirmed pass."""
        return None if self.grade is None or self.failure is not None else self.grade.reward

    @property
    def usage(self) -> TokenUsage:
        """The token counts of all responses together."""
        usages = [turn.usage for turn in self.turns]
        return TokenUsage(
            sum(usage.prompt for usage in usages),
            sum(usage.completion for usage in usages),
            sum(usage.cached for usage in usages),
        )

    @property
    def cost(self) -> float:
        """The cost of all responses together, in US dollars."""
        return sum(turn.cost for turn in self.turns)

    @property
    def unconfirmed(self) -> bool:
        """Whether all tests passed, but further test runs could not confirm the pass."""
        return self.failure is None and self.grade is not None and self.grade.verdict is Verdict.UNCONFIRMED

    def patch_after(self, turn: int) -> PatchRecord | None:
        """Return the workspace's changes after the first ``turn`` responses, or None if nothing had changed by then."""
        return next((record for record in reversed(self.patches) if record.turn <= turn), None)

    def reward_or(self, unconfirmed: float | None) -> float | None:
        """Return the reward for training.

        Args:
            unconfirmed: the reward of an unconfirmed pass; None for no reward.
        """
        return unconfirmed if self.unconfirmed else self.reward

    def to_text(self, *, indent: int | None = 1) -> str:
        """Return the trajectory in its file format: one JSON object in ASCII.

        Args:
            indent: spaces per level; None for a single line.
        """
        body = to_json(self)
        assert isinstance(body, dict)
        separators = (",", ":") if indent is None else None
        document = {"format": _FORMAT, "version": VERSION, **body}
        return json.dumps(document, indent=indent, separators=separators, allow_nan=False) + "\n"

    @classmethod
    def from_text(cls, text: str, *, name: str = "the trajectory") -> Trajectory:
        """Parse a trajectory file's text.

        Args:
            text: the result of :meth:`to_text` of this or an earlier version of MiniSandbox.
            name: the file's name in error messages.

        Raises:
            TrajectoryError: the text is not a trajectory, is damaged, has a newer version, or has unknown fields.
        """
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TrajectoryError(f"{name} is not JSON", reason=f"it is damaged: {error}") from error
        if not isinstance(body, dict):
            raise TrajectoryError(f"{name} is not a trajectory", reason="it is not a JSON object")
        upgrade(body, pop_version(body, VERSION, noun="a trajectory", file_format=_FORMAT, location=name))
        return from_json(cls, body, location=name)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read a trajectory file.

        Raises:
            TrajectoryError: the file is not a valid trajectory (:meth:`from_text`).
            OSError: the file cannot be read.
        """
        return cls.from_text(path.read_bytes().decode("utf-8", "replace"), name=str(path))
