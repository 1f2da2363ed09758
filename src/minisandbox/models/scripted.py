"""A model that returns scripted responses, for trials and reproducible runs, with its own tokeniser."""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from minisandbox.errors import InvalidValue, ModelRefused
from minisandbox.models.protocol import Completion, Message, Request, Role, Tokens, TokenUsage

ALL_OTHERS = "*"
"""The key of a script's default responses, for instances that the script does not name."""


Answerer = Callable[[Request], str | Message]
"""A function that returns the response to a request, or raises a :class:`ModelError`."""


@dataclass(frozen=True, slots=True)
class Script:
    """The responses of a scripted model, in order.

    The number of assistant messages in a request's history selects the response, so a repeated request receives the
    same response.

    Attributes:
        replies: the responses by instance or session; ``*`` for all others.
    """

    replies: Mapping[str, Sequence[Message]]

    @classmethod
    def of(cls, answers: Sequence[object] | Mapping[str, Sequence[object]]) -> Self:
        """Create a script from strings and messages: one list for all instances, or a list per instance.

        Raises:
            InvalidValue: a response is malformed.
        """
        lists = answers if isinstance(answers, Mapping) else {ALL_OTHERS: answers}
        for name, responses in lists.items():
            if isinstance(responses, str) or not isinstance(responses, Sequence):
                raise InvalidValue(f"the answers for {name!r} are not a list")
        return cls({name: tuple(map(_message, responses)) for name, responses in lists.items()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a script from a file.

        Args:
            path: JSON: a list for all instances, or ``{INSTANCE: [ANSWER, ...]}``; or JSON Lines: one answer, or one
                ``{"instance_id": ..., "answers": [...]}``, per line.

        Raises:
            InvalidValue: the file cannot be read, or is not a script.
        """
        try:
            text = path.read_text(encoding="utf-8")
            answers = _of_lines(text) if path.suffix == ".jsonl" else json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidValue(f"{path} is not a script of answers: {error}") from None
        if not isinstance(answers, list | Mapping):
            raise InvalidValue(f"{path} is not a script of answers", hint="give a list, or a list per instance")
        try:
            return cls.of(answers)
        except InvalidValue as error:
            raise error.about(str(path)) from None

    def __call__(self, request: Request) -> Message:
        """Respond to a request.

        Raises:
            ModelRefused: the script has no further response for this session.
        """
        replies = self._of_session(request.session)
        turn = sum(message.role == "assistant" for message in request.messages)
        if turn >= len(replies):
            raise ModelRefused(
                f"the script has {len(replies)} answers for {request.session!r}, and one more is requested",
                hint="let its last answer end the agent's loop",
            )
        return replies[turn]

    def _of_session(self, session: str) -> Sequence[Message]:
        """Return the responses of a session: those of the longest instance name that is a prefix of its name."""
        for end in range(len(session), 0, -1):
            if session[:end] in self.replies and not session[end : end + 1].isalnum():
                return self.replies[session[:end]]
        return self.replies.get(ALL_OTHERS, ())


def _message(answer: object) -> Message:
    """Return an answer of a script as a message: a string, or a message in OpenAI's format."""
    if isinstance(answer, str | Message):
        return Message("assistant", answer) if isinstance(answer, str) else answer
    if not isinstance(answer, Mapping) or not answer.keys() & {"content", "tool_calls"}:
        raise InvalidValue(f"{str(answer)[:100]!r} is not an answer", hint="give a text, or a message")
    return Message.from_json(answer)


class ScriptedModel:
    """A model that responds from a script. Its tokeniser has one token per byte, and marks between a message's parts.

    Args:
        script: responses in order, responses by instance, a script, or a function of the request.
        name: the model's name.
        tokens: whether responses have token ids.
    """

    def __init__(
        self,
        script: Answerer | Script | Sequence[object] | Mapping[str, Sequence[object]],
        *,
        name: str = "scripted",
        tokens: bool = True,
    ) -> None:
        self._answer: Answerer = script if callable(script) else Script.of(script)
        self._name = name
        self._tokens = tokens

    @property
    def name(self) -> str:
        """The model's name."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`Model.complete`).

        Raises:
            ModelRefused: the script has no further response.
        """
        began = time.monotonic()
        message = _message(self._answer(request))
        prompt, sampled = encode_prompt(request), encode_message(message)
        logprobs = array("d", (-(1 + token % 7) / 8 for token in sampled))
        return Completion(
            message,
            "tool_calls" if message.tool_calls else "stop",
            TokenUsage(len(prompt), len(sampled)),
            Tokens(prompt, sampled, logprobs) if self._tokens else None,
            seconds=time.monotonic() - began,
            model=self._name,
        )

    async def close(self) -> None:
        """Do nothing, because a scripted model has nothing to release."""


def _of_lines(text: str) -> object:
    """Parse a script in JSON Lines: responses for all instances, or one object per instance."""
    values = [json.loads(line) for line in text.splitlines() if line.strip()]
    scripts = [line for line in values if isinstance(line, Mapping) and "answers" in line]
    if not scripts:
        return values
    if len(scripts) != len(values) or any(script.keys() != {"instance_id", "answers"} for script in scripts):
        raise InvalidValue("lines must be all answers, or all {'instance_id': ..., 'answers': [...]}")
    names = [str(script["instance_id"]) for script in scripts]
    for before, name in itertools.pairwise(sorted(names)):
        if before == name:
            raise InvalidValue(f"there are two lines for {name}")
    return dict(zip(names, (script["answers"] for script in scripts), strict=True))


# The tokeniser has one token per byte, and special tokens, the marks, between the parts of a message. It is reversible,
# and the tokens of a continued conversation start with the tokens of the shorter conversation.

END = 256
_ROLES: dict[Role, int] = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
TOOLS, ANSWERS, THOUGHT, TEXT, CALL, NAME, ARGUMENTS = range(261, 268)


def encode_prompt(request: Request) -> array[int]:
    """Return the tokens of a prompt: the tools, the messages, and the mark that starts the response."""
    ids = array("i")
    if request.tools:
        ids.append(TOOLS)
        ids += _bytes(json.dumps([dict(tool) for tool in request.tools], sort_keys=True))
        ids.append(END)
    for message in request.messages:
        ids.append(_ROLES[message.role])
        ids += encode_message(message)
    ids.append(_ROLES["assistant"])
    return ids


def encode_message(message: Message) -> array[int]:
    """Return the tokens of a message without the mark of its role, up to and including the end mark."""
    ids = array("i")
    if message.tool_call_id is not None:
        ids += _marked(ANSWERS, message.tool_call_id)
    if message.reasoning:
        ids += _marked(THOUGHT, message.reasoning)
    if message.content:
        ids += _marked(TEXT, message.content) if ids else _bytes(message.content)
    for call in message.tool_calls:
        ids += _marked(CALL, call.id)
        for mark, text in ((NAME, call.name), (ARGUMENTS, call.arguments)):
            ids += _marked(mark, text) if text else array("i")
    ids.append(END)
    return ids


def _marked(mark: int, text: str) -> array[int]:
    return array("i", [mark]) + _bytes(text)


def _bytes(text: str) -> array[int]:
    return array("i", list(text.encode("utf-8", "replace")))  # array would read bytes as raw 4-byte items
