"""Recognise a session's captured responses in later requests, although agents rewrite them.

Agents spell the arguments of calls differently, trim texts, and drop or trim thoughts. If a request's history equals a
captured conversation up to these changes, the captured responses replace the agent's copies. The engine then reads the
tokens that it sampled, and the conversation stays one row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minisandbox.errors import InvalidValue
from minisandbox.models.dialect import arguments_object, for_history
from minisandbox.models.protocol import Message


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a request.

    Attributes:
        messages: the messages, with captured responses in place of the agent's copies.
        digest: the digest of the conversation, which ignores the changes that agents make.
        latest: the index of the latest captured response among the messages, or None.
    """

    messages: Sequence[object]
    digest: bytes
    latest: int | None


class Responses:
    """The responses of a session, by conversation and by content.

    Args:
        message: returns the message of a response from its index.
    """

    def __init__(self, message: Callable[[int], Message]) -> None:
        self._message = message
        self._by_conversation: dict[bytes, list[int]] = {}
        self._by_content: dict[bytes, int] = {}

    def add(self, index: int, history: History, answer: object) -> None:
        """Add a response.

        Args:
            index: the response's index.
            history: the request's messages.
            answer: the response's message.
        """
        content = _digest(answer)
        self._by_content[content] = index
        self._by_conversation.setdefault(_joined(history.digest, content), []).append(index)

    def restore(
        self, messages: Sequence[object], tools: Sequence[Mapping[str, object]], reasoning_field: str
    ) -> History:
        """Replace the agent's copies of responses by the responses, as long as the history equals a captured one.

        Args:
            messages: the request's messages, as JSON.
            tools: the tools that the request offers.
            reasoning_field: the engine's name for the reasoning in messages.
        """
        restored, digest, latest = [], b"", None
        for message in messages:
            content = _digest(message)
            digest = _joined(digest, content)
            restored.append(message)
            if isinstance(message, dict) and message.get("role") == "assistant":
                index = self._same_thoughts(self._by_conversation.get(digest, ()), message)
                latest = self._by_content.get(content) if index is None else index
                if index is not None:
                    restored[-1] = for_history(self._message(index), tools).to_json(reasoning_field)
        return History(restored, digest, latest)

    def _same_thoughts(self, indices: Sequence[int], message: object) -> int | None:
        """Return the latest response with the message's thoughts, or the latest one if the message has no thoughts."""
        thoughts = Message.from_json(message).reasoning.strip() if indices else ""
        return next((i for i in reversed(indices) if thoughts in ("", self._message(i).reasoning.strip())), None)


def _digest(message: object) -> bytes:
    """Hash a message without thoughts, outer spaces of a response's text, and the spelling of arguments."""
    try:
        parsed = Message.from_json(message)
    except InvalidValue:  # a role or content that only the engine knows
        content = message
    else:
        is_response = parsed.role == "assistant"
        calls = [(call.id, call.name, json.loads(arguments_object(call.arguments))) for call in parsed.tool_calls]
        text = parsed.content.strip() if is_response else parsed.content
        content = (parsed.role, text, calls, parsed.tool_call_id)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


def _joined(digest: bytes, content: bytes) -> bytes:
    return hashlib.sha256(digest + content).digest()
