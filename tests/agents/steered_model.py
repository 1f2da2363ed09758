"""A tiny model whose logits are steered along a script: an agent's conversation is sampled, but ends as written."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.unit.tiny_model import LINES, tiny_model, tiny_tokenizer, torch

from minisandbox.models.engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CONTEXT = 131_072
_FREE = 40
_BIAS = 30.0
_VOCABULARY = 6000
_DOCS = Path(__file__).parents[2] / "docs"


class Steering:
    """Raise the logits of the tokens that a script allows next, as a part of the model's forward pass.

    Each response begins with 40 letters and spaces, in any tokens. Then come the script's bytes, in any of
    their tokenizations, and the end token. The next tokens depend on all tokens before them, so the model's cache has
    one more layer, which contains them.

    Args:
        model: the model. It gets the additional layer in its configuration.
        tokenizer: a byte-level tokenizer with the tiny model's template.
        responses: the scripted response of each turn. The last one also follows prompts without tools.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> None:
        self._responses = [response.encode() for response in responses]
        self._start, self._end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        byte_of = _bytes_of_characters()
        texts = {id_: text for text, id_ in tokenizer.get_vocab().items() if id_ not in (self._start, self._end)}
        self._pieces = {id_: bytes(byte_of[character] for character in text) for id_, text in texts.items()}
        self._ids = {piece: id_ for id_, piece in self._pieces.items()}
        self._longest = max(map(len, self._ids))
        self._words = {
            id_: len(piece) for piece, id_ in self._ids.items() if not piece.strip(b" abcdefghijklmnopqrstuvwxyz")
        }
        self._layer = model.config.num_hidden_layers
        model.config.num_hidden_layers += 1
        model.register_forward_hook(self._steer, with_kwargs=True)

    def _steer(self, _model: object, _arguments: object, inputs: Mapping[str, Any], output: Any) -> None:
        ids = history = inputs["input_ids"]
        past = inputs.get("cache", inputs.get("past_key_values"))
        if past is not None:
            contents = (ids + 1).float()[:, None, :, None]  # 0 is padding
            history = past.update(contents, contents, self._layer)[0][:, 0, :, 0].long() - 1
        kept = inputs.get("logits_to_keep", 0)
        positions = torch.arange(history.shape[1])[-ids.shape[1] :][
            slice(-kept, None) if isinstance(kept, int) else kept
        ]
        for row, logits in zip(history, output.logits, strict=True):
            starts = (row == self._start).nonzero()[:, 0].tolist()
            is_response = [self._text(row[start + 1 : start + 11]).startswith(b"assistant\n") for start in starts]
            has_tools = self._text(row[starts[0] + 1 : starts[0] + 16]).startswith(b"system\nTools: ")
            for position, scores in zip(positions.tolist(), logits, strict=True):
                message = bisect(starts, position) - 1
                text = self._text(row[starts[message] + 1 : position + 1])
                if text.startswith(b"assistant\n"):
                    turn = sum(is_response[:message]) if has_tools else len(self._responses)
                    response = self._responses[min(turn, len(self._responses) - 1)]
                    scores[self._allowed(response, len(text) - len(b"assistant\n"))] += _BIAS

    def _allowed(self, response: bytes, length: int) -> list[int]:
        """Return the ids of the tokens that may follow the first bytes of a response."""
        if length < _FREE:
            return [id_ for id_, size in self._words.items() if size <= _FREE - length]
        rest = response[length - _FREE :]
        pieces = (rest[:size] for size in range(1, min(self._longest, len(rest)) + 1))
        return [self._ids[piece] for piece in pieces if piece in self._ids] or [self._end]

    def _text(self, ids: Any) -> bytes:
        return b"".join(self._pieces.get(id_, b"") for id_ in ids.tolist())


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary: printable bytes are Latin-1, the rest is above."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - an extra

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(alphabet[len(printable) :], others, strict=True))


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer that knows the words of the documentation, because agents' prompts have 60,000 characters."""
    return tiny_tokenizer([*LINES, *(path.read_text("utf-8") for path in sorted(_DOCS.rglob("*.md")))], _VOCABULARY)


def steered_engine(responses: Sequence[str]) -> TransformersEngine:
    """Return an engine for the long prompts of agents, which samples these responses turn by turn."""
    tokenizer = _tokenizer()
    model = tiny_model(len(tokenizer), scale=0.1, context=_CONTEXT)
    Steering(model, tokenizer, responses)
    return TransformersEngine(model, tokenizer, name="tiny")
