"""Conversations from one style into another."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from minisandbox.models import Message
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.styles import CannotSay, Said, Style, ToolStyle, XmlStyle
from minisandbox.trajectories.ticks import TicksStyle

STYLES: Mapping[str, Style] = {one.name: one for one in (ToolStyle(), XmlStyle(), TicksStyle())}
"""SWE-smith's three, by name."""

Rewrite = Callable[[str, str, str], str]
"""Makes of a prompt that tells of one style (the second argument) one that tells of another (the third)."""

LEFT = "answers left as they were, for they hold no action"
STALE = "prompts that may tell of another style"


class Converter:
    """Brings examples into one style. Those that are in it already stay as they are, to the letter.

    Args:
        style: the name of the style.
        styles: all that there are, by name.
        system: what takes the place of every system prompt; None: they stay.
        rewrite: adapts prompts where the style changes; None: they stay.
        tools: what the model could call, for examples that become tool calls and say nothing of it.

    Attributes:
        notes: counts of what people should know.
    """

    def __init__(
        self,
        style: str,
        *,
        styles: Mapping[str, Style] = STYLES,
        system: str | None = None,
        rewrite: Rewrite | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._to = styles[style]
        self._styles = styles
        self._system = system
        self._rewrite = rewrite
        self._tools = tuple(tools)
        self.notes: Counter[str] = Counter()

    def convert(self, example: Example) -> Example:
        """Return an example in the style.

        Raises:
            CannotSay: its own style is not known, or something in it cannot be said in the other.
        """
        messages = example.messages
        if example.style != self._to.name:
            if example.style not in self._styles:
                raise CannotSay(f"{example.traj_id}: what style its answers are in is not known")
            messages = tuple(self._messages(messages, self._styles[example.style]))
            messages = self._prompts(messages, example.style)
        if self._system is not None:
            rest = messages[1:] if messages and messages[0].role == "system" else messages
            messages = (Message("system", self._system), *rest)
        tools = (example.tools or self._tools) if self._to.answers_calls else ()
        return replace(example, messages=messages, style=self._to.name, tools=tools)

    def _messages(self, messages: Sequence[Message], source: Style) -> Iterator[Message]:
        calls: tuple[str, ...] = ()
        number = 0
        for from_model, group in itertools.groupby(messages, lambda one: one.role == "assistant"):
            if not from_model:
                yield from self._told(list(group), calls)
                continue
            for message in group:
                said = self._read(message, source)
                if said is None:
                    calls = ()
                    yield Message("assistant", message.content, reasoning=message.reasoning)
                    continue
                named = tuple(replace(call, id=f"call_{number + place}") for place, call in enumerate(said.calls))
                number += len(named)
                calls = tuple(call.id for call in named)
                yield replace(self._to.write(Said(said.thought, named)), reasoning=message.reasoning)

    def _read(self, message: Message, source: Style) -> Said | None:
        try:
            return source.read(message)
        except CannotSay:
            self.notes[LEFT] += 1
            return None

    def _told(self, messages: list[Message], calls: tuple[str, ...]) -> Iterator[Message]:
        """What is told between answers: of the role that the style has for it."""
        if not self._to.answers_calls or not calls:
            yield from (Message("user", one.content) if one.role == "tool" else one for one in messages)
            return
        if len(calls) > len(messages):
            raise CannotSay(f"{len(calls)} calls have {len(messages)} answers together")
        for place, one in enumerate(messages):
            yield Message("tool", one.content, tool_call_id=calls[place]) if place < len(calls) else one

    def _prompts(self, messages: tuple[Message, ...], source: str) -> tuple[Message, ...]:
        """The messages before the first answer, adapted."""
        opening = tuple(itertools.takewhile(lambda one: one.role != "assistant", messages))
        rewrite = self._rewrite or (lambda text, _from, _to: text)
        adapted = tuple(replace(one, content=rewrite(one.content, source, self._to.name)) for one in opening)
        if adapted == opening and self._system is None:
            self.notes[STALE] += 1
        return adapted + messages[len(opening) :]
