"""The calls in a sampled answer: where they begin and end, and how long it takes to say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from minisandbox.models import Message, Request
from minisandbox.models.renderer import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}
MILLION = 1_000_000


class Tokenizer:
    """What reading an answer asks of a tokenizer: that it has a template."""

    chat_template = "{{ tools }}"
    eos_token_id = None


def read(text: str) -> Message:
    form = Renderer(cast("PreTrainedTokenizerBase", Tokenizer()))
    return form.message(text, Request((Message("user", "do"),), (TOOL,)))


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('I do.\n<tool_call>\n{"name": "x"}  \n</tool_call>', "I do.", "{}"),
        ('<tool_call>{"name": "x", "arguments": {"a": "</tool_call>"}}</tool_call>', "", '{"a": "</tool_call>"}'),
        ('<tool_call> no <tool_call>{"name": "x"}</tool_call>', "<tool_call> no", "{}"),
        ('</tool_call><tool_call>{"name": "x"}</tool_call><tool_call>{', "</tool_call>", "{}"),
    ],
)
def test_where_a_call_begins_and_ends(text: str, content: str, arguments: str) -> None:
    message = read(text)
    assert message.content == content
    assert [(one.name, one.arguments) for one in message.tool_calls] == [("x", arguments)]


@pytest.mark.parametrize(
    "unit", ["<tool_call>{", "<tool_call>{}", "<tool_call>{</tool_call>", "<tool_call>  ", "}</tool_call>", "  "]
)
def test_long_answers_without_a_call_are_read_in_one_go(unit: str) -> None:
    """Were the time not in proportion to the answer's length, this would not end."""
    text = unit * (4 * MILLION // len(unit))
    assert read(text) == Message("assistant", text)


def test_an_answer_of_many_calls_is_read_in_one_go() -> None:
    message = read('<tool_call>{"name": "x"}</tool_call>' * 50_000)
    assert len({call.id for call in message.tool_calls}) == 50_000
