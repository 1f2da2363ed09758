"""Action formats: how a model's answer says what is to be done, and how it is told what came of it.

Every parser reads an answer once from the front to the back, without regular expressions: however long or odd an answer
is, reading it takes time in proportion to its length.
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
    """A way to say actions.

    Attributes:
        name: what options call it.
        reminder: a sentence for a model that did not keep to it.
    """

    name: str
    reminder: str

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """What the model may call, for the request."""
        ...

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the actions of an answer, in order; at least one.

        Raises:
            FormatError: there is none, there are too many, or one cannot be understood.
        """
        ...

    def render(self, *actions: Action) -> Message:
        """Return an answer that says these actions; :meth:`parse` reads the same from it.

        Raises:
            FormatError: this format cannot say them.
        """
        ...

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return what tells the model what came of the action of that number in its answer."""
        ...

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return what tells the model that nothing of its answer was done, and why."""
        ...


FORMATS: Mapping[str, ActionFormat] = {one.name: one for one in (TextFormat(), ToolFormat(), XmlFormat())}
"""The formats by name."""

__all__ = ["FORMATS", "ActionFormat", "FormatError", "TextFormat", "ToolFormat", "XmlFormat"]
