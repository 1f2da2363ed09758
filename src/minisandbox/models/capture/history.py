"""Recognise a session's captured responses in later requests, although agents rewrite them.

Agents spell the arguments of calls differently, trim texts, and drop or trim thoughts. If a request's history equals a
captured conversation up to these changes, the captured responses replace the agent's copies. The engine then reads the
tokens that it sampled, and the conversation stays one row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisandbox.errors import InvalidValue
from minisandbox.models.dialect import arguments_object, for_history
from minisandbox.models.protocol import Message


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a request.

    Attributes:
        messages: the messages, with captured responses in place of the agent's copies.
        serialized: each message as JSON.
        digests: the digest of each message, which ignores the changes that agents make.
        latest: the index of the latest captured response among the messages, or None.
    """

    messages: Sequence[object]
    serialized: Sequence[str]
    digests: Sequence[bytes]
    latest: int | None


class Responses:
    """The responses of a session, by conversation and by content."""

    def __init__(self) -> None:
        self._responses: list[Message] = []
        self._by_conversation: dict[bytes, list[int]] = {}
        self._by_content: dict[bytes, int] = {}

    def add(self, history: History, answer: object) -> None:
        """Add a response.

        Args:
            history: the request's messages.
            answer: the response's message.
        """
        index, content, conversation = len(self._responses), _digest(answer), b""
        for digest in (*history.digests, content):
            conversation = _joined(conversation, digest)
        self._by_content[content] = index
        self._by_conversation.setdefault(conversation, []).append(index)
        self._responses.append(Message.from_json(answer))

    def restore(
        self, chat: Mapping[str, object], reasoning_field: str, stored: Mapping[str, tuple[str, bytes]]
    ) -> History:
        """Replace the agent's copies of responses by the responses, as long as the history equals a captured one.

        Args:
            chat: the request, as chat completions.
            reasoning_field: the engine's name for the reasoning in messages.
            stored: messages of earlier requests as JSON, each with itself and its digest, because hashing takes time.
        """
        messages, tools = chat["messages"], chat.get("tools")
        assert isinstance(messages, list)
        restored, serialized, digests, conversation, latest = [], [], [], b"", None
        for message in messages:
            text = serialize(message)
            text, digest = stored.get(text) or (text, _digest(message))
            conversation = _joined(conversation, digest)
            digests.append(digest)
            restored.append(message)
            serialized.append(text)
            if isinstance(message, dict) and message.get("role") == "assistant":
                index = self._same_thoughts(self._by_conversation.get(conversation, ()), message)
                latest = self._by_content.get(digest) if index is None else index
                if index is not None:
                    response = for_history(self._responses[index], tools if isinstance(tools, list) else ())
                    restored[-1] = response.to_json(reasoning_field)
                    serialized[-1] = serialize(restored[-1])
        return History(restored, serialized, digests, latest)

    def _same_thoughts(self, indices: Sequence[int], message: object) -> int | None:
        """Return the latest response with the message's thoughts, or the latest one if the message has no thoughts."""
        thoughts = Message.from_json(message).reasoning.strip() if indices else ""
        return next((i for i in reversed(indices) if thoughts in ("", self._responses[i].reasoning.strip())), None)


def serialize(message: object) -> str:
    """Convert to JSON; replace unpaired surrogates of truncated strings, because UTF-8 cannot encode them."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


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
