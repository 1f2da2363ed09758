"""Store the captured requests and responses of one rollout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from minisandbox.models.capture.history import History, Responses, serialize
from minisandbox.models.graph import TokenGraph, TokenRow
from minisandbox.models.protocol import Completion, TokenUsage

VERSION = 1
"""The version of the JSON format of rows."""

# The estimated memory of a token (4 bytes for the id, 8 for the log-probability), of a turn without its tokens, of a
# dictionary entry including the dictionary's spare room, and of an error without its message.
_TOKEN_BYTES = 12
_TURN_BYTES = 1500
_ENTRY_BYTES = 300
_ERROR_BYTES = 200
_MOST_ERRORS = 200
_LONGEST_ERROR = 2000


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """One request and its response.

    Attributes:
        messages: the request's messages, each as JSON. Equal messages of a session share one string.
        answer: the response's message, as JSON.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        usage: the token counts.
        began: seconds from the start of the session to the request.
        seconds: seconds from the request to the response.
    """

    messages: tuple[str, ...]
    answer: str
    finish_reason: str
    usage: TokenUsage
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CapturedError:
    """A failed request.

    Attributes:
        status: the HTTP status sent to the agent; 499 if the agent disconnected.
        message: the error message.
        began: seconds from the start of the session to the request.
    """

    status: int
    message: str
    began: float


class CaptureSession:
    """The requests and responses of one rollout, collected while the rollout runs.

    Attributes:
        name: the name of the rollout.
        turns: the responses, in order of arrival; rows refer to them by index.
        errors: the first failed requests, up to a limit.
        errors_left_out: the number of further failed requests.
        closed: whether the session no longer accepts responses.
        forks: the number of responses that start a new row, although the request's history has a response of the
            session. Requests of sub-agents and for titles are not forks.

    Args:
        name: the name of the rollout.
        limit: maximum bytes that the session may hold in memory.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.turns: list[CapturedTurn] = []
        self.errors: list[CapturedError] = []
        self.errors_left_out = 0
        self.closed = False
        self.forks = 0
        self._limit = limit
        self._held = 0
        self._handled = 0
        self._texts: dict[str, tuple[str, bytes]] = {}
        self._graph = TokenGraph()
        self._responses = Responses()
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the session started."""
        return time.monotonic() - self._began

    @property
    def full(self) -> bool:
        """Whether the session has reached its limit and accepts no more responses."""
        return self._held >= self._limit

    @property
    def left(self) -> int:
        """Bytes available for handling further requests."""
        return max(0, self._limit - self._held - self._handled)

    @contextmanager
    def handling(self) -> Iterator[Callable[[int], bool]]:
        """Reserve memory for handling a request, and release it when the block ends.

        Yields:
            A function that reserves a number of bytes; returns False if fewer bytes are available.
        """
        reserved = 0

        def take(count: int) -> bool:
            nonlocal reserved
            if count > self.left:
                return False
            reserved += count
            self._handled += count
            return True

        try:
            yield take
        finally:
            self._handled -= reserved

    @property
    def usage(self) -> TokenUsage:
        """The token counts of all responses together."""
        names = ("prompt", "completion", "cached")
        return TokenUsage(*(sum(getattr(turn.usage, name) for turn in self.turns) for name in names))

    @property
    def messages(self) -> tuple[Mapping[str, object], ...]:
        """The latest conversation with its response; empty before the first response."""
        return self._conversation(self.turns[-1]) if self.turns else ()

    def rows(self) -> tuple[TokenRow, ...]:
        """Return the training rows: one per response that no later response continues."""
        return self._graph.rows()

    def restore(self, chat: Mapping[str, object], reasoning_field: str) -> History:
        """Return a request's messages, in which captured responses replace the agent's copies (:class:`.Responses`).

        Args:
            chat: the request, as chat completions.
            reasoning_field: the engine's name for the reasoning in messages.
        """
        return self._responses.restore(chat, reasoning_field, self._texts)

    def add(
        self, history: History, answer: object, completion: Completion, began: float, *, trained: bool = True
    ) -> None:
        """Add a response.

        Args:
            history: the request's messages.
            answer: the response's message.
            completion: the parsed response.
            began: :attr:`elapsed` at the request.
            trained: whether its tokens carry loss; False if the request constrained the sampling.
        """
        serialized = tuple(map(self._text, history.serialized, history.digests))
        seconds = self.elapsed - began
        turn = CapturedTurn(serialized, serialize(answer), completion.finish_reason, completion.usage, began, seconds)
        before = self._graph.held
        index = self._graph.add(completion.tokens, trained=trained)
        self.forks += history.latest is not None and self._graph.previous(index) != history.latest
        self.turns.append(turn)
        self._responses.add(history, answer)
        answers = 2 * sys.getsizeof(turn.answer)  # the responses have it once more
        self._held += (self._graph.held - before) * _TOKEN_BYTES + answers + 8 * len(serialized) + _TURN_BYTES

    def fail(self, status: int, message: str, began: float) -> None:
        """Add a failed request; if there are too many or the session is full, only count it."""
        message = message[:_LONGEST_ERROR]
        size = len(message.encode("utf-8", "replace")) + _ERROR_BYTES
        if len(self.errors) >= _MOST_ERRORS or self._held + size > self._limit:
            self.errors_left_out += 1
            return
        self.errors.append(CapturedError(status, message, began))
        self._held += size

    def to_json(self) -> Iterator[dict[str, object]]:
        """Yield each training row, with its tokens and its conversation, as JSON types."""
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
                "versions": [list(run) for run in row.versions],
                "finish_reason": last.finish_reason,
                "messages": list(self._conversation(last)),
            }

    def _conversation(self, turn: CapturedTurn) -> tuple[Mapping[str, object], ...]:
        return tuple(json.loads(text) for text in (*turn.messages, turn.answer))

    def _text(self, text: str, digest: bytes) -> str:
        """Return the stored string of a message, so that equal messages share one."""
        if text not in self._texts:
            self._texts[text] = text, digest
            self._held += sys.getsizeof(text) + _ENTRY_BYTES
        return self._texts[text][0]
