"""Arrange a trajectory for its page: turns with their commands, diffs, tests, and tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from minisandbox.models import Message, TokenRow
from minisandbox.trajectories import PatchRecord, StepRecord, Trajectory, TurnRecord
from minisandbox.view.text import Diff, diff_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 4000
"""Tokens of a row per page."""
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```[ \t]*$\n?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a message: prose, or a block of code."""

    text: str
    is_code: bool


@dataclass(slots=True)
class Turn:
    """One response of the model, with what followed until the next one.

    Attributes:
        number: the turn's number, from 1; 0 for what came before the first response.
        record: times and token counts; None before the first response.
        message: the index of the response in the trajectory's messages, or None.
        passages: the response's text.
        reasoning: the reasoning that the engine separated from the text.
        calls: the tool calls, as text.
        steps: the commands with their indices.
        observations: the messages to the model after the response, with their indices.
        patch: the record of the workspace's changes, if they changed in this turn.
        diff: the workspace's changes after this turn; None if they did not change in it.
    """

    number: int
    record: TurnRecord | None = None
    message: int | None = None
    passages: list[Passage] = field(default_factory=list)
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    steps: list[tuple[int, StepRecord]] = field(default_factory=list)
    observations: list[tuple[int, Message]] = field(default_factory=list)
    patch: PatchRecord | None = None
    diff: Diff | None = None

    @property
    def failed(self) -> bool:
        """Whether a command of the turn did not exit with status 0."""
        return any(step.exit_code != 0 for _, step in self.steps)


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of a rollout; agents without a model have one turn, with number 0."""
    turns = [Turn(number) for number in range(len(trajectory.turns) + 1)]
    for turn, record in zip(turns[1:], trajectory.turns, strict=True):
        turn.record = record
        if record.message < len(trajectory.messages):
            _add_response(turn, record.message, trajectory.messages[record.message])
    starts = {turn.message: turn for turn in turns if turn.message is not None}
    current = turns[0]
    for index, message in enumerate(trajectory.messages):
        current = starts.get(index, current)
        if index != current.message:
            current.observations.append((index, message))
    for index, step in enumerate(trajectory.steps):
        turns[min(step.turn, len(turns) - 1)].steps.append((index, step))
    for turn in turns:  # a block of the response that ran is shown as the command
        commands = {step.command for _, step in turn.steps}
        turn.passages = [passage for passage in turn.passages if not passage.is_code or passage.text not in commands]
    _add_patches(turns, trajectory.patches)
    return turns


def _add_response(turn: Turn, index: int, message: Message) -> None:
    turn.message, turn.reasoning = index, message.reasoning
    turn.passages = list(passages(message.content))
    turn.calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]


def _add_patches(turns: Sequence[Turn], patches: Sequence[PatchRecord]) -> None:
    before = b""
    for record in patches:
        turn = turns[min(record.turn, len(turns) - 1)]
        turn.patch, patch = record, record.patch or b""
        turn.diff, before = diff_of(patch, before), patch


def passages(text: str) -> Iterator[Passage]:
    """Split a message at its fenced blocks of code."""
    end = 0
    for match in _FENCE.finditer(text):
        if prose := text[end : match.start()].strip("\n"):
            yield Passage(prose, is_code=False)
        if code := match[1].rstrip("\n"):
            yield Passage(code, is_code=True)
        end = match.end()
    if prose := text[end:].strip("\n"):
        yield Passage(prose, is_code=False)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens that are shown alike, or one sampled token.

    Attributes:
        text: the decoded tokens, or their ids.
        level: from 0 (certain) to 9 (improbable); None for context.
        has_loss: whether the tokens carry loss.
        hint: the id and the log-probability of a sampled token.
    """

    text: str
    level: int | None
    has_loss: bool
    hint: str = ""


def token_spans(row: TokenRow, start: int, tokenizer: PreTrainedTokenizerBase | None) -> list[TokenSpan]:
    """Return a part of a row's tokens for the page.

    Args:
        row: the row.
        start: the index of the first token.
        tokenizer: decodes the tokens; None shows their ids.
    """
    spans: list[TokenSpan] = []
    indices = range(start, min(start + TOKENS, len(row.ids)))
    for is_context, group in groupby(indices, key=lambda index: not row.mask[index] and not row.logprobs[index]):
        if is_context:
            spans.append(TokenSpan(_decoded([row.ids[index] for index in group], tokenizer), None, has_loss=False))
            continue
        for index in group:
            logprob = row.logprobs[index]
            hint = f"token {row.ids[index]}: probability {math.exp(min(0.0, logprob)):.3f}, log {logprob:.3f}"
            text = _decoded([row.ids[index]], tokenizer)
            spans.append(TokenSpan(text, min(9, int(-logprob * 2)), bool(row.mask[index]), hint))
    return spans


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    return "".join(f"{token} " for token in ids) if tokenizer is None else str(tokenizer.decode(ids))


def failure_lines(log: str) -> list[str]:
    """Return pytest's summary of failures in a log: the lines that begin with FAILED or ERROR, at most five."""
    return [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))][:5]


def tests_by_outcome(trajectory: Trajectory) -> list[tuple[str, list[str]]]:
    """Return the named tests of a grade by outcome, passed ones last."""
    groups: dict[str, list[str]] = {}
    for test, outcome in trajectory.grade.outcomes if trajectory.grade else ():
        groups.setdefault(outcome, []).append(test)
    return sorted(groups.items(), key=lambda group: (group[0] == "passed", -len(group[1])))
