"""What was captured of one rollout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from minisandbox.models.graph import TokenGraph, TokenRow
from minisandbox.models.protocol import Completion, TokenUsage

VERSION = 1
"""Of the rows as JSON."""

_TOKEN_BYTES = 12  # an id of 4 bytes, a log-probability of 8
_TURN_BYTES = 1000  # of objects around them
_ENTRY_BYTES = 150  # of a dictionary that grows
_ERROR_BYTES = 200
_MOST_ERRORS = 200
_LONGEST_ERROR = 2000


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """One answer.

    Attributes:
        messages: the request's messages, each as JSON. Equal ones of a session are one object.
        answer: the answer's message, as JSON.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        usage: tokens that it took.
        began: seconds from the beginning of the session to the request.
        seconds: how long it took.
    """

    messages: tuple[str, ...]
    answer: str
    finish_reason: str
    usage: TokenUsage
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CapturedError:
    """A request that got no answer.

    Attributes:
        status: what the agent was told, of HTTP; 499 if it did not wait for that.
        message: why.
        began: seconds from the beginning of the session to the request.
    """

    status: int
    message: str
    began: float


class CaptureSession:
    """What one rollout asked and was answered; grows while the rollout runs.

    Attributes:
        name: the rollout.
        turns: the answers, in the order in which they came. Their numbers are those in the rows.
        errors: the first requests without one, as far as there was room for them.
        errors_left_out: how many more there were.
        closed: whether nothing is taken any more.

    Args:
        name: the rollout.
        limit: bytes that may be held.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.turns: list[CapturedTurn] = []
        self.errors: list[CapturedError] = []
        self.errors_left_out = 0
        self.closed = False
        self._limit = limit
        self._held = 0
        self._handled = 0
        self._texts: dict[str, str] = {}
        self._graph = TokenGraph()
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def full(self) -> bool:
        """Whether it holds as much as it may: it takes no further answer."""
        return self._held >= self._limit

    @property
    def left(self) -> int:
        """Bytes that a further request may take while it is handled."""
        return max(0, self._limit - self._held - self._handled)

    @contextmanager
    def handling(self) -> Iterator[Callable[[int], bool]]:
        """Handle a request: what this gives takes bytes for it, or says that so many are not left.

        They are given back at the end.
        """
        taken = 0

        def take(count: int) -> bool:
            nonlocal taken
            if count > self.left:
                return False
            taken += count
            self._handled += count
            return True

        try:
            yield take
        finally:
            self._handled -= taken

    @property
    def usage(self) -> TokenUsage:
        """Tokens of all answers together."""
        every = [turn.usage for turn in self.turns]
        return TokenUsage(*(sum(getattr(one, name) for one in every) for name in ("prompt", "completion", "cached")))

    @property
    def messages(self) -> tuple[Mapping[str, object], ...]:
        """The latest conversation, its answer included; empty before the first answer."""
        return self._conversation(self.turns[-1]) if self.turns else ()

    def rows(self) -> tuple[TokenRow, ...]:
        """Return what to train on: a row for each conversation that nothing went on with."""
        return self._graph.rows()

    def add(
        self, messages: Sequence[object], answer: object, completion: Completion, began: float, *, trained: bool = True
    ) -> None:
        """Take an answer.

        Args:
            messages: of the request.
            answer: the answer's message.
            completion: the same, read; with tokens.
            began: :attr:`elapsed` at the request.
            trained: whether its tokens carry loss; not where the request forced what may be sampled.
        """
        assert completion.tokens is not None
        texts = tuple(self._text(message) for message in messages)
        seconds = self.elapsed - began
        turn = CapturedTurn(texts, _json(answer), completion.finish_reason, completion.usage, began, seconds)
        before = self._graph.held
        self._graph.add(completion.tokens, trained=trained)
        self.turns.append(turn)
        self._held += (
            (self._graph.held - before) * _TOKEN_BYTES + sys.getsizeof(turn.answer) + 8 * len(texts) + _TURN_BYTES
        )

    def fail(self, status: int, message: str, began: float) -> None:
        """Take a request that got no answer; only its number where there are many, or no room for it is left."""
        message = message[:_LONGEST_ERROR]
        size = len(message.encode("utf-8", "replace")) + _ERROR_BYTES
        if len(self.errors) >= _MOST_ERRORS or self._held + size > self._limit:
            self.errors_left_out += 1
            return
        self.errors.append(CapturedError(status, message, began))
        self._held += size

    def to_json(self) -> Iterator[dict[str, object]]:
        """Return each row for a file: tokens, and the conversation they are."""
        for number, row in enumerate(self.rows()):
            last = self.turns[row.turns[-1]]
            yield {
                "version": VERSION,
                "session": self.name,
                "row": number,
                "turns": list(row.turns),
                "ids": row.ids.tolist(),
                "logprobs": row.logprobs.tolist(),
                "mask": list(row.mask),
                "finish_reason": last.finish_reason,
                "messages": list(self._conversation(last)),
            }

    def _conversation(self, turn: CapturedTurn) -> tuple[Mapping[str, object], ...]:
        return tuple(json.loads(text) for text in (*turn.messages, turn.answer))

    def _text(self, message: object) -> str:
        text = _json(message)
        if text not in self._texts:
            self._texts[text] = text
            self._held += sys.getsizeof(text) + _ENTRY_BYTES
        return self._texts[text]


def _json(value: object) -> str:
    """Without halves of surrogate pairs, which clients that cut texts send, and no file can hold."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()
