"""The policy: a Llama of a million parameters with random weights, and a tokenizer of its own.

The tokenizer is byte-level BPE over code. Every word of the grammar and every line number is one token. An edit such as
``< -> <= 7`` therefore has five tokens, with the end of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from examples.learning.mutations import PAIRS, WORDS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, USER, AGENT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 2048
CONTEXT = 1024
_LINES = 30
_OFTEN = 3000  # repetitions of a forced token, more frequent than any part of a word, so that BPE merges it


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for conversations about code like `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, USER, AGENT, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([*texts, *_forced()], trainer)
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast_tokenizer.chat_template = TEMPLATE
    return fast_tokenizer


def make_model(vocabulary: int, *, width: int = 160, layers: int = 4, seed: int = 0) -> LlamaForCausalLM:
    """Return a Llama with random weights; its attention heads have 32 columns and share one head of keys and values."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=1, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, attention_dropout=0.0, pad_token_id=0, eos_token_id=3, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        prompt: what the model reads: the function, or an observation.
        answer: the response.
        has_loss: whether to train on the response. The oracle's wrong edits are only context.
    """

    prompt: str
    answer: str
    has_loss: bool = True


def encode(tokenizer: PreTrainedTokenizerBase, turns: Iterable[Turn]) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and its loss mask: a response and its end token carry loss.

    Prompts and responses are tokenized apart, as the engine of the rollouts does.

    Args:
        tokenizer: a tokenizer with a chat template.
        turns: the conversation.
    """
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    mask: list[int] = []
    text = ""
    for turn in turns:
        messages.append({"role": "user", "content": turn.prompt})
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        messages.append({"role": "assistant", "content": f" {turn.answer}"})
        rest = str(tokenizer.apply_chat_template(messages, tokenize=False)).removeprefix(prompt)
        answer, end, _ = rest.partition(str(tokenizer.eos_token))
        for part, has_loss in ((prompt.removeprefix(text), False), (answer + end, turn.has_loss)):
            part_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
            ids += part_ids
            mask += [int(has_loss)] * len(part_ids)
        text = prompt + answer + end
    return ids, mask


def _pattern() -> str:
    """Return the pattern of pre-tokens, which BPE never merges: line numbers, words of the grammar, Python's words."""
    symbols = sorted({word for word in WORDS if not word[0].isalnum()} | {"**", "->", ":="}, key=len, reverse=True)
    pairs = sorted(" ".join(pair) for pair in PAIRS)
    return "|".join(
        [
            r"(?:(?<=\n)|^) \d{1,2}(?= )",
            r" \d{1,2}$",
            r" ?(?:" + "|".join(map(re.escape, pairs)) + r")(?!\w)",
            r"\n",
            r" +(?= )",
            r" ?(?:" + "|".join(map(re.escape, symbols)) + ")",
            r" ?[A-Za-z_]\w*",
            r" ?\d",
            r"[()\[\]{}:,.]+",
            r" ?[^\s\w]",
            r" +",
        ]
    )


def _forced() -> Iterable[str]:
    lines = [f" {number} x" for number in range(1, _LINES + 1)]
    words = (*lines, *WORDS, *(f" {word}" for word in WORDS), "pass", "fail", "error", " submit", " skip", " ->")
    return (text for text in words for _ in range(_OFTEN))
