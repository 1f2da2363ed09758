"""Tokenised rows: loss is on what a model has sampled, or would have, and on nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.training_tools import DATA, MESSAGES, byte_row, example, saved_tokenizer

from minisandbox.agents.actions import TOOLS
from minisandbox.errors import InvalidValue, MissingExtra, TrajectoryError
from minisandbox.models import Message
from minisandbox.models.bytewise import decode_answer
from minisandbox.trajectories.converting import Converter
from minisandbox.trajectories.sources import read_examples
from minisandbox.trajectories.tokenised import (
    IGNORED,
    Tokenizer,
    captured_rows,
    count_tokens,
    open_tokenizer,
    shown_mask,
    templated_row,
)
from minisandbox.trajectories.writing import write_rows

FORGETFUL = (  # as templates of reasoning models: earlier answers lose their thoughts
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content if loop.last or message.role != 'assistant' else message.content.split('```')[0] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Characters:
    """A tokenizer with a token for each character and ChatML's two marks; knows no other template."""

    marks = ("<|im_start|>", "<|im_end|>")

    def __init__(self) -> None:
        self.all_special_ids = [0, 1]

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        lines = [f"<|im_start|>tools\n{json.dumps(options['tools'])}<|im_end|>\n"] if options["tools"] else []
        for one in conversation:
            calls = "".join(
                f"<call>{call['function']['name']}{json.dumps(call['function']['arguments'])}</call>"
                for call in one.get("tool_calls", ())
            )
            lines.append(f"<|im_start|>{one['role']}\n{one['content']}{calls}<|im_end|>\n")
        return "".join(lines) + ("<|im_start|>assistant\n" if options["add_generation_prompt"] else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        parts = [part for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text) if part]
        return [
            token
            for part in parts
            for token in ([self.marks.index(part)] if part in self.marks else [ord(one) + 2 for one in part])
        ]

    def decode(self, token_ids: Any) -> str:
        return "".join(self.marks[token] if token < 2 else chr(token - 2) for token in token_ids)


@pytest.fixture(params=["characters", "transformers"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Characters() if request.param == "characters" else open_tokenizer(saved_tokenizer(tmp_path / "tokenizer"))


# --- captured --------------------------------------------------------------------------------------------------------


def test_captured_tokens_are_exactly_those_that_were_sampled() -> None:
    one = example(rows=(byte_row(),))
    [row] = captured_rows(one)
    assert (row.ids, row.mask, row.logprobs) == (one.rows[0].ids, one.rows[0].mask, one.rows[0].logprobs)
    table = row.to_row()
    labels: Any = table["labels"]
    assert [label for label in labels if label != IGNORED] == [
        token for token, loss in zip(row.ids, row.mask, strict=True) if loss
    ]
    assert labels.count(IGNORED) == row.mask.count(0)
    assert (table["traj_id"], table["instance_id"], table["row"]) == (one.traj_id, "a__b-1", 0)


def test_the_mask_in_print_is_what_the_model_said() -> None:
    [row] = captured_rows(example(rows=(byte_row(),)))

    class Bytes(Characters):
        def decode(self, token_ids: Any) -> str:
            return decode_answer(token_ids).content

    lines = list(shown_mask(row, Bytes()))
    headings = [line for line in lines if line.startswith("===")]
    assert [line.split(":")[0] for line in headings] == ["=== context", "=== LOSS"] * 2
    said = [message.content for message in MESSAGES if message.role == "assistant"]
    assert lines[3::4] == said
    assert headings[-1].endswith(f"to {len(row.ids) - 1} ({len(said[1]) + 1})"), "with the token that ends it"
    assert list(shown_mask(row))[1].split() == [str(token) for token in row.ids[: row.mask.index(1)]]


# --- by a chat template ----------------------------------------------------------------------------------------------


def test_a_template_says_what_a_model_would_have_sampled(tokenizer: Tokenizer) -> None:
    row = templated_row(example(), tokenizer)
    lines = list(shown_mask(row, tokenizer))
    said = [message.content + "<|im_end|>" for message in MESSAGES if message.role == "assistant"]
    assert lines[3::4] == said, "the headers and the newline behind the end carry no loss"
    whole = "".join(lines[1::2])
    context = [one.to_json() for one in MESSAGES]
    rendered = tokenizer.apply_chat_template(context, tools=None, tokenize=False, add_generation_prompt=False)
    assert whole == rendered
    assert row.logprobs is None
    assert row.to_row()["logprobs"] is None


def test_the_context_is_what_the_model_would_have_read(tokenizer: Tokenizer) -> None:
    row = templated_row(example(), tokenizer)
    for number, message in enumerate(MESSAGES):
        if message.role == "assistant":
            prompt = [one.to_json() for one in MESSAGES[:number]]
            text = tokenizer.apply_chat_template(prompt, tools=None, tokenize=False, add_generation_prompt=True)
            read = tokenizer.encode(str(text), add_special_tokens=False)
            assert row.ids[: len(read)].tolist() == read
            assert row.mask[len(read)] == 1


def test_tool_calls_and_published_sets(tokenizer: Tokenizer) -> None:
    [one, _] = read_examples(DATA / "published_tool.jsonl")
    converted = Converter("tool", tools=TOOLS).convert(one)
    row = templated_row(converted, tokenizer)
    text = "\n".join(line for line in shown_mask(row, tokenizer) if line.startswith("I'll look"))
    assert '<call>str_replace_editor{"command": "view"' in text, "arguments are decoded for the template"
    assert 0 < row.mask.count(1) < len(row.mask) / 2, "the observation at the end is not in it"
    for style in ("xml", "ticks"):
        [plain, _] = read_examples(DATA / f"published_{style}.jsonl")
        assert templated_row(plain, tokenizer).mask.count(1)


def test_tokens_are_counted_by_the_template(tokenizer: Tokenizer) -> None:
    assert count_tokens(example(), tokenizer) == len(templated_row(example(), tokenizer).ids)


def test_a_template_that_rewrites_what_came_before_is_refused(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(saved_tokenizer(tmp_path / "t"), chat_template=FORGETFUL)
    with pytest.raises(TrajectoryError, match="message 4 makes the chat template change earlier text") as caught:
        templated_row(example(), tokenizer)
    assert caught.value.hint is not None
    assert "--chat-template" in caught.value.hint


def test_a_template_that_refuses_a_conversation(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = open_tokenizer(saved_tokenizer(tmp_path / "t"), chat_template=template)
    with pytest.raises(InvalidValue, match="rejects") as caught:
        templated_row(example(), tokenizer)
    assert "roles must alternate" in (caught.value.reason or "")


def test_tokenizers_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="no chat template"):
        open_tokenizer(saved_tokenizer(tmp_path / "t", template=None))
    with pytest.raises(InvalidValue, match="cannot open the tokenizer"):
        open_tokenizer(str(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match="transformers"):
        open_tokenizer(str(tmp_path / "t"))


def test_no_answer_no_loss() -> None:
    row = templated_row(example(messages=(Message("user", "x"),)), Characters())
    assert not row.ids


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "folder"])
def test_tokenised_rows_in_files(tmp_path: Path, name: str) -> None:
    rows = [*captured_rows(example(rows=(byte_row(),))), templated_row(example(), Characters())]
    if name == "folder":
        datasets = pytest.importorskip("datasets")
    elif name == "x.parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    assert write_rows(tmp_path / name, (row.to_row() for row in rows), "tokens") == 2
    if name == "folder":
        found = list(datasets.load_from_disk(str(tmp_path / name)))
    elif name == "x.parquet":
        found = parquet.read_table(tmp_path / name).to_pylist()
    else:
        found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    for one, row in zip(found, rows, strict=True):
        assert one == row.to_row(), "exact to the bit"
