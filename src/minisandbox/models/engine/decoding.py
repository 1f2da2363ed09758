"""The decoding loop: prompts are read one by one, answers are drawn together, a token at a time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from minisandbox.models.engine.cache import (
    KeysValues,
    PrefixStore,
    check_layers,
    contents,
    growing_cache,
    padded,
)
from minisandbox.models.engine.sampling import draw
from minisandbox.models.protocol import FinishReason, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel


@dataclass(slots=True, eq=False)
class Row:
    """An answer that is being drawn.

    Attributes:
        prompt: the tokens that it answers.
        sampling: how it is drawn.
        limit: tokens at most.
        stopped: says of the sampled tokens whether a stop text has come; None where there is none.
        sampled: what was drawn so far.
        logprobs: with which log-probabilities.
        finish: why it has ended; None while it has not.
        cached: tokens of the prompt that had not to be read again.
    """

    prompt: array[int]
    sampling: Sampling
    limit: int
    stopped: Callable[[array[int]], bool] | None = None
    sampled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    finish: FinishReason | None = None
    cached: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.sampling.seed)  # noqa: S311 - answers are drawn, no secrets

    def uniform(self) -> float:
        """Return the next of its own random numbers."""
        return self._random.random()

    def take(self, token: int, logprob: float, ends: frozenset[int]) -> None:
        """Take a drawn token, and see whether it ends the answer."""
        self.sampled.append(token)
        self.logprobs.append(logprob)
        if token in ends or (self.stopped is not None and self.stopped(self.sampled)):
            self.finish = "stop"
        elif len(self.sampled) >= self.limit:
            self.finish = "length"


class Decoding(Protocol):
    """What draws answers together. One thread uses it."""

    @property
    def rows(self) -> Sequence[Row]:
        """Those that are being drawn."""
        ...

    def admit(self, row: Row) -> None:
        """Let a row run with the others."""
        ...

    def step(self) -> list[Row]:
        """Go on; returns the rows that end with it, which run no longer."""
        ...

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows run no longer."""
        ...

    def forget(self) -> None:
        """Drop everything that the weights have made: they have changed."""
        ...


class Decoder:
    """A model and the answers that it is drawing. One thread uses it.

    A prompt is read alone, without padding: its first token depends on nothing else. Rows that run are padded on the
    left to the longest; what is padded has no weight: a row's neighbours change its logits by rounding at most.

    Args:
        model: a causal language model in evaluation mode.
        ends: tokens that end an answer.
        kept: bytes of keys and values that are kept for prompts to come.

    Raises:
        InvalidValue: the model has layers without full attention.
    """

    def __init__(self, model: PreTrainedModel, ends: frozenset[int], *, kept: int) -> None:
        check_layers(model)
        self.rows: list[Row] = []
        self._model = model
        self._ends = ends
        self._store = PrefixStore(kept)
        self._layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._lengths: list[int] = []
        self._cache: Cache = None
        self._logits: torch.Tensor = None

    def admit(self, row: Row) -> None:
        """Read a row's prompt, and let it run with the others."""
        import torch  # noqa: PLC0415 - an extra

        known, row.cached = self._store.longest(row.prompt)
        cache = growing_cache(known or self._layers)
        rest = torch.tensor([row.prompt[row.cached :]], dtype=torch.long, device=self._model.device)
        positions = torch.arange(row.cached, len(row.prompt), device=self._model.device)[None]
        with torch.inference_mode():
            output = self._model(
                input_ids=rest, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            self._join(row, cache, output.logits[:, -1])

    def step(self) -> list[Row]:
        """Draw a token for each row; returns those that end with it, which run no longer."""
        import torch  # noqa: PLC0415 - an extra

        with torch.inference_mode():
            sampling = [row.sampling for row in self.rows]
            tokens, logprobs = draw(self._logits, sampling, [row.uniform() for row in self.rows])
            for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
                row.take(token, logprob, self._ends)
            ended = [row for row in self.rows if row.finish]
            for number, row in enumerate(self.rows):
                if row.finish:
                    self._store.put((row.prompt + row.sampled)[: self._lengths[number]], self._of(number))
            self.drop(ended)
            if self.rows:
                self._advance()
        return ended

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows run no longer."""
        import torch  # noqa: PLC0415 - an extra

        stay = [number for number, row in enumerate(self.rows) if row not in rows]
        if len(stay) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in stay]
        self._lengths = [self._lengths[number] for number in stay]
        if not stay:
            self._cache = self._logits = None
            return
        chosen = torch.tensor(stay, device=self._model.device)
        self._logits = self._logits[chosen]
        layers = [(keys[chosen], values[chosen]) for keys, values in contents(self._cache)]
        self._cache = growing_cache(padded(layers, max(self._lengths)))

    def forget(self) -> None:
        """Drop everything that the weights have made: they have changed."""
        self.drop(list(self.rows))
        self._store.clear()

    def _join(self, row: Row, cache: Cache, logits: torch.Tensor) -> None:
        import torch  # noqa: PLC0415 - an extra

        if self.rows:
            width = max(*self._lengths, len(row.prompt))
            both = zip(padded(contents(self._cache), width), padded(contents(cache), width), strict=True)
            cache = growing_cache([(torch.cat((a[0], b[0])), torch.cat((a[1], b[1]))) for a, b in both])
            logits = torch.cat((self._logits, logits))
        self.rows.append(row)
        self._lengths.append(len(row.prompt))
        self._cache, self._logits = cache, logits

    def _advance(self) -> None:
        """Have the model read what was drawn last."""
        import torch  # noqa: PLC0415 - an extra

        device = self._model.device
        ids = torch.tensor([[row.sampled[-1]] for row in self.rows], device=device)
        lengths = torch.tensor(self._lengths, device=device)[:, None]
        width = int(lengths.max()) + 1
        # the first columns of a row are padding; the last is the new token
        mask = (torch.arange(width, device=device)[None] >= width - 1 - lengths).long()
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=lengths, past_key_values=self._cache, use_cache=True
        )
        self._logits = output.logits[:, -1]
        self._lengths = [length + 1 for length in self._lengths]

    def _of(self, number: int) -> list[KeysValues]:
        """The keys and values of one row's own tokens."""
        start = max(self._lengths) - self._lengths[number]
        chosen = slice(number, number + 1)
        return [(keys[chosen, :, start:], values[chosen, :, start:]) for keys, values in contents(self._cache)]
