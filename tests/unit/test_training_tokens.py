"""Tokenised rows: loss is on what a model has sampled, or would have, and on nothing else."""

from __future__ import annotations

import itertools
import json
import re
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.scripted_model import decode_answer
from tests.unit.training_tools import DATA, MESSAGES, byte_row, example, saved_tokenizer

from minisandbox.agents.actions import TOOLS
from minisandbox.errors import InvalidValue, MissingExtra, TrajectoryError
from minisandbox.models import Message
from minisandbox.models.renderer import Conversations
from minisandbox.trajectories.sources import read_examples
from minisandbox.trajectories.styles import Converter
from minisandbox.trajectories.tokenised import (
    IGNORED,
    captured_rows,
    count_tokens,
    open_tokenizer,
    shown_mask,
    templated_row,
)
from minisandbox.trajectories.writing import write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORGETFUL = (  # as templates of reasoning models: earlier answers lose their thoughts
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content if loop.last or message.role != 'assistant' else message.content.split('```')[0] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Characters:
    """A tokenizer with a token for each character and ChatML's two marks; knows no other template."""

    marks = ("<|im_start|>", "<|im_end|>")

    def __init__(self, *, is_fast: bool = True) -> None:
        self.all_special_ids = [0, 1]
        self.is_fast = is_fast

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        lines = [f"<|im_start|>tools\n{json.dumps(options['tools'])}<|im_end|>\n"] if options["tools"] else []
        for one in conversation:
            calls = "".join(
                f"<call>{call['function']['name']}{json.dumps(call['function']['arguments'])}</call>"
                for call in one.get("tool_calls", ())
            )
            lines.append(f"<|im_start|>{one['role']}\n{one['content']}{calls}<|im_end|>\n")
        return "".join(lines) + ("<|im_start|>assistant\n" if options["add_generation_prompt"] else "")

    def __call__(self, text: str, **options: bool) -> dict[str, Any]:
        assert options == {"add_special_tokens": False} | ({"return_offsets_mapping": True} if len(options) > 1 else {})
        assert self.is_fast or len(options) == 1
        parts = list(re.finditer(r"<\|im_start\|>|<\|im_end\|>|(?s:.)", text))
        ids = [self.marks.index(part[0]) if part[0] in self.marks else ord(part[0]) + 2 for part in parts]
        return {"input_ids": ids, "offset_mapping": [part.span() for part in parts]}

    def decode(self, token_ids: Any) -> str:
        return "".join(self.marks[token] if token < 2 else chr(token - 2) for token in token_ids)


@pytest.fixture(params=["characters", "slow", "transformers"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerBase:
    if request.param == "transformers":
        return open_tokenizer(saved_tokenizer(tmp_path / "tokenizer"))
    return Characters(is_fast=request.param == "characters")


# --- captured --------------------------------------------------------------------------------------------------------


def test_captured_tokens_are_exactly_those_that_were_sampled() -> None:
    one = example(rows=(byte_row(), replace(byte_row(), mask=bytes(len(byte_row().mask)))))  # a row without loss
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


def test_a_template_says_what_a_model_would_have_sampled(tokenizer: PreTrainedTokenizerBase) -> None:
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


def test_the_context_is_what_the_model_would_have_read(tokenizer: PreTrainedTokenizerBase) -> None:
    row = templated_row(example(), tokenizer)
    for number, message in enumerate(MESSAGES):
        if message.role == "assistant":
            prompt = [one.to_json() for one in MESSAGES[:number]]
            text = tokenizer.apply_chat_template(prompt, tools=None, tokenize=False, add_generation_prompt=True)
            read = tokenizer(str(text), add_special_tokens=False)["input_ids"]
            assert row.ids[: len(read)].tolist() == read
            assert row.mask[len(read)] == 1


SPACED: dict[str, dict[str, Any]] = {  # how families of tokenizers treat spaces, and the beginning of a text
    "llama-2": {"normalizer": True},  # a space mark before each text, and behind each special token
    "phi-3": {"normalizer": True, "strips": True},  # special tokens that include the spaces and newlines behind them
    "metaspace-always": {"scheme": "always"},
    "metaspace-first": {"scheme": "first"},
    "bytes": {"prefix": False},
    "bytes-prefix": {"prefix": True},
}
LAYOUTS: dict[
    str, dict[str, tuple[str, ...]]
] = {  # before and after each role's message; an answer's third text is not part of its prompt
    "marks": {"user": ("<|user|>\n", "<|end|>\n"), "assistant": ("<|assistant|>\n", "<|end|>\n")},
    "no-newline": {"user": ("<|user|>", "<|end|>"), "assistant": ("<|assistant|>", "<|end|>")},
    "instructions": {"user": ("<s>[INST] ", " [/INST]"), "assistant": ("", " </s>", " ")},
    "words": {"user": ("USER: ", " "), "assistant": ("ASSISTANT:", "</s>")},
}


class Spaced:
    """A tokenizer of the library ``tokenizers``, with the interface of one of ``transformers``."""

    is_fast = True

    def __init__(self, family: str, layout: str) -> None:
        library: Any = pytest.importorskip("tokenizers")
        pre, options = library.pre_tokenizers, SPACED[family]
        characters = [*map(chr, range(32, 127)), "\n", "\u2581", *pre.ByteLevel.alphabet()]
        merges = [("\u2581", "I"), ("\u0120", "I"), ("o", "n"), ("on", "e"), ("\n", "\n"), ("\u010a", "\u010a")]
        vocabulary = [*dict.fromkeys(characters), *(first + second for first, second in merges)]
        model = library.models.BPE({token: number for number, token in enumerate(vocabulary)}, merges)
        self.inner = library.Tokenizer(model)
        if "prefix" in options:
            self.inner.pre_tokenizer = pre.ByteLevel(add_prefix_space=options["prefix"])
            self.inner.post_processor = library.processors.ByteLevel(trim_offsets=True)
        elif "scheme" in options:
            self.inner.pre_tokenizer = pre.Metaspace(prepend_scheme=options["scheme"])
        else:
            prepend, replace = library.normalizers.Prepend("\u2581"), library.normalizers.Replace(" ", "\u2581")
            self.inner.normalizer = library.normalizers.Sequence([prepend, replace])
        marks = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
        strips = options.get("strips", False)
        self.inner.add_special_tokens([library.AddedToken(mark, rstrip=strips, normalized=False) for mark in marks])
        self.all_special_ids = [self.inner.token_to_id(mark) for mark in marks]
        self.layout = LAYOUTS[layout]

    def apply_chat_template(self, conversation: Any, **options: object) -> str:
        parts = []
        for one in conversation:
            before, after, *lead = self.layout["assistant" if one["role"] == "assistant" else "user"]
            parts += [before, *lead, one["content"], after]
        return "".join(parts) + (self.layout["assistant"][0] if options["add_generation_prompt"] else "")

    def __call__(self, text: str, **options: bool) -> dict[str, Any]:
        encoding = self.inner.encode(text, add_special_tokens=options["add_special_tokens"])
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def decode(self, token_ids: Any) -> str:
        text = "".join(map(self.inner.id_to_token, token_ids))
        return text.replace("\u2581", " ").replace("\u0120", " ").replace("\u010a", "\n")


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", SPACED)
def test_tokens_are_those_of_the_whole_text(family: str, layout: str, is_fast: bool) -> None:
    tokenizer = Spaced(family, layout)
    tokenizer.is_fast = is_fast
    row = templated_row(example(), tokenizer)
    whole = tokenizer.apply_chat_template([one.to_json() for one in MESSAGES], add_generation_prompt=False)
    assert row.ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    parts = [list(group) for _, group in itertools.groupby(zip(row.ids, row.mask, strict=True), lambda pair: pair[1])]
    answers = [tokenizer.decode([token for token, _ in part]) for part in parts if part[0][1]]
    end = tokenizer.layout["assistant"][1].rstrip("\n")
    said = [message.content + end for message in MESSAGES if message.role == "assistant"]
    assert [answer.strip() for answer in answers] == said
    for number, message in enumerate(MESSAGES):
        if message.role == "assistant":
            prompt = [one.to_json() for one in MESSAGES[:number]]
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
            read = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert row.ids[: len(read)].tolist() == read, "as a server tokenizes the prompt"
            assert (row.mask[len(read) - 1], row.mask[len(read)]) == (0, 1)


@pytest.mark.parametrize("family", SPACED)
def test_a_prompt_that_ends_with_a_space(family: str) -> None:
    tokenizer = Spaced(family, "words")
    tokenizer.layout = {**tokenizer.layout, "assistant": ("ASSISTANT: ", "</s>")}
    row = templated_row(example(messages=(Message("user", "x"), Message("assistant", "\nyes"))), tokenizer)
    loss = [token for token, loss in zip(row.ids, row.mask, strict=True) if loss]
    assert tokenizer.decode(loss) == "\nyes</s>"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", SPACED)
def test_the_engine_continues_a_conversation_with_the_tokens_of_the_whole_text(family: str, layout: str) -> None:
    tokenizer = Spaced(family, layout)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def render(count: int, *, prompt: bool) -> str:
        messages = [one.to_json() for one in MESSAGES[:count]]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)

    known = Conversations(encode, ["<|end|>", "</s>"])
    for number in (number for number, message in enumerate(MESSAGES) if message.role == "assistant"):
        before, text = render(number, prompt=True), render(number + 1, prompt=False)
        prompt = known.encode(before)
        assert prompt.tolist() == encode(before)
        known.keep(before, text, array("i", encode(text.removesuffix("\n"))))


def test_tool_calls_and_published_sets(tokenizer: PreTrainedTokenizerBase) -> None:
    [one, _] = read_examples(DATA / "published_tool.jsonl")
    converted = Converter("tool", tools=TOOLS).convert(one)
    row = templated_row(converted, tokenizer)
    text = "\n".join(line for line in shown_mask(row, tokenizer) if line.startswith("I'll look"))
    assert '<call>str_replace_editor{"command": "view"' in text, "arguments are decoded for the template"
    assert 0 < row.mask.count(1) < len(row.mask) / 2, "the observation at the end is not in it"
    for style in ("xml", "ticks"):
        [plain, _] = read_examples(DATA / f"published_{style}.jsonl")
        assert templated_row(plain, tokenizer).mask.count(1)


def test_tokens_are_counted_by_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
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
