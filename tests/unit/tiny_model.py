"""A model that is made in a second: random weights, and a tokenizer trained on a few lines. No hub, no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minisandbox.models.engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

os.environ["HF_HUB_OFFLINE"] = "1"
_WHY = "the extra [local] is not installed"
torch = pytest.importorskip("torch", reason=_WHY)
transformers = pytest.importorskip("transformers", reason=_WHY)
torch.set_num_threads(1)

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
LINES = [
    "def add(a, b):\n    return a + b\n",
    "the tests of the module fail",
    "grüße, 世界 🙂",
    "<tool_call>{}</tool_call>",
]


def tiny_tokenizer(lines: Sequence[str] = LINES * 8, vocabulary: int = 400) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - an extra

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(lines, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(
    vocabulary: int, kind: str = "qwen2", seed: int = 0, scale: float = 0.3, context: int = 4096
) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocabulary, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": context,
        "bos_token_id": None, "eos_token_id": 1, "initializer_range": scale,
    }  # fmt: skip
    if kind == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def save_tiny_model(directory: Path, kind: str = "qwen2") -> Path:
    """Write a model with its tokenizer; return the directory."""
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer), kind).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def tiny_engine(
    kind: str = "qwen2", *, max_batch: int = 8, cache_bytes: int = 1 << 30, scale: float = 0.3
) -> TransformersEngine:
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), kind, scale=scale)
    return TransformersEngine(model, tokenizer, name="tiny", max_batch=max_batch, cache_bytes=cache_bytes)
