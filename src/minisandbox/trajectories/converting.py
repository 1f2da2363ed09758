"""Convert conversations from one style to another."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from minisandbox.models import Message
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.styles import CannotSay, ParsedAnswer, Style, ToolStyle, XmlStyle
from minisandbox.trajectories.ticks import TicksStyle

STYLES: Mapping[str, Style] = {style.name: style for style in (ToolStyle(), XmlStyle(), TicksStyle())}
"""SWE-smith's three styles, by name."""

Rewrite = Callable[[str, str, str], str]
"""Rewrites a prompt that describes one style (second argument) to describe another (third)."""

LEFT = "answers left unchanged because they hold no action"
STALE = "prompts that may describe another style"


class Converter:
    """Converts examples to one style. Examples already in that style stay unchanged.

    Args:
        style: the name of the target style.
        styles: all known styles, by name.
        system: replaces every system prompt; None keeps them.
        rewrite: adapts prompts when the style changes; None keeps them.
        tools: the model's tools, for examples that become tool calls and list no tools.

    Attributes:
        notes: counts for the report.
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
        """Return an example in the target style.

        Raises:
            CannotSay: its own style is unknown, or the target style cannot express a call.
        """
        messages = example.messages
        if example.style != self._to.name:
            if example.style not in self._styles:
                raise CannotSay(f"{example.traj_id}: its style is not known", hint="name it: --style STYLE")
            messages = tuple(self._messages(messages, self._styles[example.style]))
            messages = self._prompts(messages, example.style)
        if self._system is not None:
            dialogue = messages[1:] if messages and messages[0].role == "system" else messages
            messages = (Message("system", self._system), *dialogue)
        tools = (example.tools or self._tools) if self._to.answers_calls else ()
        return replace(example, messages=messages, style=self._to.name, tools=tools)

    def _messages(self, messages: Sequence[Message], source: Style) -> Iterator[Message]:
        calls: tuple[str, ...] = ()
        number = 0
        for from_model, group in itertools.groupby(messages, lambda message: message.role == "assistant"):
            if not from_model:
                yield from self._results(list(group), calls)
                continue
            for message in group:
                answer = self._read(message, source)
                if answer is None:
                    calls = ()
                    yield Message("assistant", message.content, reasoning=message.reasoning)
                    continue
                named = tuple(replace(call, id=f"call_{number + index}") for index, call in enumerate(answer.calls))
                number += len(named)
                calls = tuple(call.id for call in named)
                yield replace(self._to.write(ParsedAnswer(answer.thought, named)), reasoning=message.reasoning)

    def _read(self, message: Message, source: Style) -> ParsedAnswer | None:
        try:
            return source.read(message)
        except CannotSay:
            self.notes[LEFT] += 1
            return None

    def _results(self, messages: list[Message], calls: tuple[str, ...]) -> Iterator[Message]:
        """Yield the messages between responses, with the roles of the target style."""
        if not self._to.answers_calls or not calls:
            yield from (Message("user", message.content) if message.role == "tool" else message for message in messages)
            return
        if len(calls) > len(messages):
            raise CannotSay(f"{len(calls)} calls have only {len(messages)} results")
        for index, message in enumerate(messages):
            yield Message("tool", message.content, tool_call_id=calls[index]) if index < len(calls) else message

    def _prompts(self, messages: tuple[Message, ...], source: str) -> tuple[Message, ...]:
        """Return the messages before the first response, adapted."""
        opening = tuple(itertools.takewhile(lambda message: message.role != "assistant", messages))
        rewrite = self._rewrite or (lambda text, _from, _to: text)
        adapted = tuple(
            replace(message, content=rewrite(message.content, source, self._to.name)) for message in opening
        )
        if adapted == opening and self._system is None:
            self.notes[STALE] += 1
        return adapted + messages[len(opening) :]
