"""Parts of a trajectory: steps, turns, timings, failures."""

from __future__ import annotations

from dataclasses import dataclass

from minisandbox.models import FinishReason, TokenUsage


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One command of an agent and its result.

    Attributes:
        command: a shell command, or an argument list.
        outcome: ``exited``, ``signaled`` or ``timeout``.
        exit_code: the exit status, or None.
        signal: the signal that killed it, or None.
        stdout: the recorded part of its stdout.
        stderr: the recorded part of its stderr.
        dropped_stdout: number of bytes of stdout that were dropped.
        dropped_stderr: number of bytes of stderr that were dropped.
        duration: its run time in seconds.
        turn: number of model responses before it.
        began: seconds from the start of the agent's loop to the start of the command.
        stateful: whether it ran in a shell that keeps its state between commands.
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
        message: the response's index in the messages.
        began: seconds from the start of the agent's loop to the request.
        seconds: from the request to the response, failed tries included.
        tries: number of requests, failed ones included.
        usage: tokens used.
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
        sandbox_ready: from requesting the sandbox until it was ready.
        agent: the agent's loop.
        patch: taking the submission.
        grade: grading the submission.
        total: the whole rollout, including the wait for grading.
        queued: from the start of the batch to the start of the rollout; not in the total.
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
        kind: the error's class name.
        detail: its message.
    """

    phase: str
    kind: str
    detail: str
