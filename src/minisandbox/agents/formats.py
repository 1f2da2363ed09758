"""Action formats: how a model's responses express actions, and how results are reported to it.

Every parser reads a response once, front to back, without regular expressions, so that parsing takes linear time for
any input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from minisandbox.agents.actions import Action, FormatError
from minisandbox.agents.text_format import TextFormat
from minisandbox.agents.tool_format import ToolFormat
from minisandbox.agents.xml_format import XmlFormat
from minisandbox.models import Message


class ActionFormat(Protocol):
    """A format for actions in responses.

    Attributes:
        name: its name in options.
        reminder: a sentence for a model that did not follow it.
    """

    name: str
    reminder: str

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """The tools for the request."""
        ...

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the actions of a response, in order; at least one.

        Raises:
            FormatError: it has no actions, too many, or a malformed one.
        """
        ...

    def render(self, *actions: Action) -> Message:
        """Return a response with these actions; :meth:`parse` is the inverse.

        Raises:
            FormatError: this format cannot express them.
        """
        ...

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the message that reports the result of the response's action of this number."""
        ...

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return the messages that tell the model why none of its response was performed."""
        ...


FORMATS: Mapping[str, ActionFormat] = {one.name: one for one in (TextFormat(), ToolFormat(), XmlFormat())}
"""The formats by name."""

__all__ = ["FORMATS", "ActionFormat", "FormatError", "TextFormat", "ToolFormat", "XmlFormat"]
