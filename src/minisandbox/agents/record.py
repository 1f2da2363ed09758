"""The record of an agent's work: its history, responses, commands, tokens and patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from minisandbox.models import Completion, Message, TokenGraph, TokenRow
from minisandbox.models.dialect import for_history
from minisandbox.types import ExecResult

KEPT_OUTPUT = 64 << 10
"""Maximum bytes of stdout, and of stderr, that a record keeps per command: half from the head, half from the tail."""
_MARKER = b"\n[... %d bytes dropped ...]\n"
"""The line between the head and tail of shortened output, the same as the sandbox's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the model.

    Attributes:
        message: the response's index in the history; -1 if it is not in the history, as for side requests of a
            command-line agent.
        completion: the response without tokens, because the record's graph stores each token once.
        began: seconds from the start of the session to the request.
        queued: seconds for which the request waited in queues.
    """

    message: int
    completion: Completion
    began: float
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One command of an agent, and its result.

    Attributes:
        command: the command as given; for an edit, the tool's name and the arguments as JSON.
        result: the result, with at most :data:`KEPT_OUTPUT` bytes of each stream. The agent saw all output that the
            sandbox keeps.
        turn: the number of responses before the command.
        began: seconds from the start of the session to the start of the command.
        stateful: whether the command ran in the session's shell, which keeps its state between commands.
    """

    command: str | tuple[str, ...]
    result: ExecResult
    turn: int = 0
    began: float = 0.0
    stateful: bool = False


MOST_PATCH = 64 << 10
"""Maximum bytes of a turn's patch that is recorded."""


@dataclass(frozen=True, slots=True)
class TurnPatch:
    """The workspace's changes after a turn, recorded only if they differ from those after the previous turn.

    Attributes:
        turn: the number of responses before the patch was taken.
        patch: the patch; None if it is too large, or could not be taken.
        detail: why there is no patch, or "".
    """

    turn: int
    patch: bytes | None
    detail: str = ""


@dataclass(slots=True)
class Record:
    """The record of an agent's work. It only grows, so it is complete even if the agent is stopped.

    Attributes:
        messages: the history of the conversation.
        turns: the model's responses.
        steps: the commands.
        tokens: the tokens read and sampled.
        patches: the workspace's changes after each turn that changed it.
    """

    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tokens: TokenGraph = field(default_factory=TokenGraph)
    patches: list[TurnPatch] = field(default_factory=list)

    def add(
        self, completion: Completion, began: float, tools: Sequence[Mapping[str, object]] = (), queued: float = 0.0
    ) -> None:
        """Append a response of the model, in a form that engines accept in the history of further requests.

        Args:
            completion: the response.
            began: seconds from the start of the session to the request.
            tools: the tools offered to the model.
            queued: seconds for which the request waited in queues.
        """
        completion = replace(completion, message=for_history(completion.message, tools))
        self.add_turn(completion, len(self.messages), began, queued)
        self.messages.append(completion.message)

    def add_turn(
        self, completion: Completion, message: int, began: float, queued: float = 0.0, *, trained: bool = True
    ) -> None:
        """Append a response without its message.

        Args:
            completion: the response.
            message: its index in the history, or -1.
            began: seconds from the start of the session to the request.
            queued: seconds for which the request waited in queues.
            trained: whether its tokens carry loss.
        """
        self.tokens.add(completion.tokens, trained=trained)
        # Store tokens only in the graph: each prompt repeats the earlier ones, so whole prompts take quadratic space.
        self.turns.append(Turn(message, replace(completion, tokens=None), began, queued))

    def rows(self) -> tuple[TokenRow, ...]:
        """Return the training rows; their turns are indices of ``turns``."""
        return self.tokens.rows()


def shortened(result: ExecResult) -> ExecResult:
    """Return a result with only the head and tail of its output, because hundreds of records are in memory at once."""
    stdout, dropped_stdout = _ends(result.stdout_bytes, result.dropped_stdout)
    stderr, dropped_stderr = _ends(result.stderr_bytes, result.dropped_stderr)
    return replace(
        result, stdout_bytes=stdout, stderr_bytes=stderr, dropped_stdout=dropped_stdout, dropped_stderr=dropped_stderr
    )


def _ends(output: bytes, dropped_count: int) -> tuple[bytes, int]:
    """Return the head and tail of output, and the total number of dropped bytes."""
    if len(output) <= KEPT_OUTPUT:
        return output, dropped_count
    # The sandbox's marker is in the middle, which is dropped.
    marker_length = len(_MARKER % dropped_count) if dropped_count else 0
    total_count = dropped_count + len(output) - marker_length - KEPT_OUTPUT
    if total_count <= dropped_count:  # only the marker exceeds the limit
        return output, dropped_count
    half = KEPT_OUTPUT // 2
    return output[:half] + _MARKER % total_count + output[-half:], total_count
