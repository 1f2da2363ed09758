"""The parts of a trajectory: steps, turns, timings, failures."""

from __future__ import annotations

from dataclasses import dataclass

from minisandbox.models import FinishReason, TokenUsage


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One command of an agent and what came of it.

    Attributes:
        command: what it ran: a shell command, or arguments.
        outcome: ``exited``, ``signaled`` or ``timeout``.
        exit_code: its exit status, or None.
        signal: the signal that ended it, or None.
        stdout: what was kept of its output.
        stderr: the same of its errors.
        dropped_stdout: bytes of stdout that were not kept.
        dropped_stderr: bytes of stderr that were not kept.
        duration: seconds it took.
        turn: how many answers of the model came before it.
        began: seconds from the beginning of the agent's loop to its start.
        stateful: whether it ran in a shell that keeps its state from one command to the next.
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
    """One answer of the model.

    Attributes:
        message: the answer's index in the messages.
        began: seconds from the beginning of the agent's loop to the request.
        seconds: from the request to the answer, tries that failed included.
        tries: how often it was asked for.
        usage: tokens that it took.
        finish_reason: why it ended: ``stop``, ``length``, ``tool_calls``.
        cost: US dollars.
    """

    message: int
    began: float
    seconds: float
    tries: int
    usage: TokenUsage
    finish_reason: FinishReason
    cost: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a rollout's time went, in seconds; 0.0 for a phase that was not reached.

    Attributes:
        sandbox_ready: from asking for the sandbox to its being ready.
        agent: the agent's loop.
        patch: taking the submission.
        grade: grading it.
        total: all of the rollout, waiting for its grading included.
        queued: from the beginning of the batch until it was begun; not in the total.
        image: of this, until its image was there.
        model: of the agent's loop, waiting for the model's answers.
        commands: of the agent's loop, running commands.
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
    """What kept a rollout from being finished; never a statement about the agent's work.

    Attributes:
        phase: ``image``, ``sandbox``, ``agent``, ``model``, ``patch`` or ``grade``.
        kind: the error's class.
        detail: its message.
    """

    phase: str
    kind: str
    detail: str
