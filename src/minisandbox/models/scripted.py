"""A model that answers from a script: for tests, and for runs that must be the same every time."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from minisandbox.errors import ContextExceeded, InvalidValue, ModelError, ModelRefused
from minisandbox.models.bytewise import decode_answer, encode_message, encode_prompt
from minisandbox.models.faults import ENDS_WITH, FAULTS, Fault
from minisandbox.models.protocol import Completion, FinishReason, Message, Request, Tokens, TokenUsage

EVERYBODY = "*"
"""In a script: whoever has no answers of his own."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a script.

    Attributes:
        message: what is answered.
        fault: what goes wrong instead, every time that this answer is asked for; "" for nothing.
    """

    message: Message = field(default_factory=lambda: Message("assistant", ""))
    fault: Fault | None = None

    @classmethod
    def of(cls, body: object) -> Self:
        """Make one of a text, a :class:`Message`, a message in OpenAI's layout, or ``{"fault": NAME}``.

        Raises:
            InvalidValue: it is none of these.
        """
        if isinstance(body, cls):
            return body
        if isinstance(body, str | Message):
            return cls(Message("assistant", body) if isinstance(body, str) else body)
        if isinstance(body, Mapping) and body.keys() == {"fault"}:
            for fault in FAULTS:
                if fault == body["fault"]:
                    return cls(fault=fault)
            raise InvalidValue(f"there is no fault {body['fault']!r}", hint=f"one of {', '.join(FAULTS)}")
        if not isinstance(body, Mapping) or not body.keys() & {"content", "tool_calls"}:
            raise InvalidValue(f"an answer is {str(body)[:100]!r}", hint="a text, a message, or a fault")
        return cls(Message.from_json(body))


Answerer = Callable[[Request], str | Message | Reply]
"""Makes an answer of a request; it may raise a :class:`ModelError` instead."""


@dataclass(frozen=True, slots=True)
class Script:
    """Answers, for each rollout in order.

    Which answer is next is seen from the history, by the number of the assistant's messages in it: a request that is
    made again gets the same one.

    Attributes:
        replies: of an instance, a session, or all others (``*``).
    """

    replies: Mapping[str, Sequence[Reply]]

    @classmethod
    def of(cls, answers: Sequence[object] | Mapping[str, Sequence[object]]) -> Self:
        """Make one of texts, messages and faults: a list for all, or lists by instance.

        Raises:
            InvalidValue: an answer is none.
        """
        lists = answers if isinstance(answers, Mapping) else {EVERYBODY: answers}
        for name, some in lists.items():
            if isinstance(some, str) or not isinstance(some, Sequence):
                raise InvalidValue(f"the answers for {name!r} are no list")
        return cls({name: tuple(map(Reply.of, some)) for name, some in lists.items()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Args:
            path: JSON, a list for all or ``{INSTANCE: [ANSWER, ...]}``; or JSON Lines, an answer each, or
                ``{"instance_id": ..., "answers": [...]}`` each.

        Raises:
            InvalidValue: it cannot be read, or is no script.
        """
        try:
            text = path.read_text(encoding="utf-8")
            found = _of_lines(text) if path.suffix == ".jsonl" else json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidValue(f"{path}: no script of answers: {error}") from None
        if not isinstance(found, list | Mapping):
            raise InvalidValue(f"{path}: no script of answers", hint="a list, or an object with a list per instance")
        try:
            return cls.of(found)
        except InvalidValue as error:
            raise error.about(str(path)) from None

    def __call__(self, request: Request) -> Reply:
        """Answer a request.

        Raises:
            ModelRefused: the script has no answer for it.
        """
        mine = self._of_session(request.session)
        asked = sum(message.role == "assistant" for message in request.messages)
        if asked >= len(mine):
            raise ModelRefused(
                f"the script has {len(mine)} answers for {request.session!r}, and one more is asked for",
                hint="let its last answer end the agent's loop",
            )
        return mine[asked]

    def _of_session(self, session: str) -> Sequence[Reply]:
        """The answers of the instance that a session's name begins with; the longest such instance."""
        for end in range(len(session), 0, -1):
            if session[:end] in self.replies and not session[end : end + 1].isalnum():
                return self.replies[session[:end]]
        return self.replies.get(EVERYBODY, ())


class ScriptedModel:
    """Answers from a script, with tokens of a tokeniser of its own (:mod:`minisandbox.models.bytewise`).

    Attributes:
        in_flight: requests that have no answer yet.
        most_in_flight: how many there were at once.

    Args:
        script: answers in order, answers by instance, a script, or a function of the request.
        name: what it calls itself.
        latency: seconds until an answer, or a function of the request that tells them.
        context: tokens that prompt and answer may have together; None for no bound.
        tokens: whether it tells its tokens.
    """

    def __init__(
        self,
        script: Answerer | Script | Sequence[object] | Mapping[str, Sequence[object]],
        *,
        name: str = "scripted",
        latency: float | Callable[[Request], float] = 0.0,
        context: int | None = None,
        tokens: bool = True,
    ) -> None:
        self._answer: Answerer = script if callable(script) else Script.of(script)
        self._name = name
        self._latency = latency
        self._context = context
        self._tokens = tokens
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def name(self) -> str:
        """What it was called."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Answer a conversation (:meth:`Model.complete`). A fault of the script is raised as what a client makes of it.

        Raises:
            ModelError: the script says so, or has no answer.
        """
        began = time.monotonic()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            latency = self._latency(request) if callable(self._latency) else self._latency
            await asyncio.sleep(latency)
            reply = Reply.of(self._answer(request))
            if reply.fault is not None:
                raise _fault_error(reply.fault)
            return self._completion(request, reply.message, began)
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Do nothing: it holds nothing."""

    def _completion(self, request: Request, message: Message, began: float) -> Completion:
        prompt, sampled = encode_prompt(request), encode_message(message)
        room = self._context - len(prompt) if self._context is not None else len(sampled)
        if room < 1:
            raise ContextExceeded(f"the conversation has {len(prompt)} tokens, and {self._name} reads {self._context}")
        most = min(room, request.sampling.max_tokens or room)
        finish: FinishReason = "tool_calls" if message.tool_calls else "stop"
        if len(sampled) > most:
            message, finish = decode_answer(sampled[:most]), "length"
            sampled = encode_message(message)[:-1]
        logprobs = array("d", (-(1 + token % 7) / 8 for token in sampled))
        return Completion(
            message,
            finish,
            TokenUsage(len(prompt), len(sampled)),
            Tokens(prompt, sampled, logprobs) if self._tokens else None,
            seconds=time.monotonic() - began,
            model=self._name,
        )


def _fault_error(fault: Fault) -> ModelError:
    return ENDS_WITH[fault](f"the script's fault: {fault}")


def _of_lines(text: str) -> object:
    """The lines of a script: answers for all, or objects that name an instance."""
    found = [json.loads(line) for line in text.splitlines() if line.strip()]
    for_one = [one for one in found if isinstance(one, Mapping) and "answers" in one]
    if not for_one:
        return found
    if len(for_one) != len(found) or any(one.keys() != {"instance_id", "answers"} for one in for_one):
        raise InvalidValue("lines are all answers, or all {'instance_id': ..., 'answers': [...]}")
    names = [str(one["instance_id"]) for one in for_one]
    for before, name in itertools.pairwise(sorted(names)):
        if before == name:
            raise InvalidValue(f"there are two lines for {name}")
    return {str(one["instance_id"]): one["answers"] for one in for_one}
