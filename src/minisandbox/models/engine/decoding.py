"""The decoding loop: prompts are read one by one; responses are sampled together, a token at a time."""

from __future__ import annotations

import inspect
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
    """A response being sampled.

    Attributes:
        prompt: the prompt's tokens.
        sampling: the sampling options.
        limit: maximum number of tokens.
        stopped: returns whether the sampled tokens contain a stop text; None without stop texts.
        sampled: the tokens sampled so far.
        logprobs: their log-probabilities.
        finish: the finish reason; None while it runs.
        cached: tokens of the prompt that came from the cache.
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
        self._random = random.Random(self.sampling.seed)  # noqa: S311 - sampling, not a secret

    def uniform(self) -> float:
        """Return the row's next random number."""
        return self._random.random()

    def take(self, token: int, logprob: float, ends: frozenset[int]) -> None:
        """Append a sampled token, and check whether it ends the response."""
        self.sampled.append(token)
        self.logprobs.append(logprob)
        if token in ends or (self.stopped is not None and self.stopped(self.sampled)):
            self.finish = "stop"
        elif len(self.sampled) >= self.limit:
            self.finish = "length"


class Decoding(Protocol):
    """Samples several responses together. Used by one thread only."""

    @property
    def rows(self) -> Sequence[Row]:
        """The running rows."""
        ...

    def admit(self, row: Row) -> None:
        """Add a row to the running ones."""
        ...

    def step(self) -> list[Row]:
        """Sample further tokens; remove and return the finished rows."""
        ...

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows."""
        ...

    def forget(self) -> None:
        """Drop all rows and caches, after a change of the weights."""
        ...


class Decoder:
    """A model with the responses that it is sampling. Used by one thread only.

    A prompt is read alone and without padding, so its first token depends on nothing else. Running rows are padded on
    the left to the longest. Padding has no weight, so other rows change a row's logits only by rounding.

    Args:
        model: a causal language model in evaluation mode.
        ends: tokens that end a response.
        kept: bytes of keys and values to keep for later prompts.

    Raises:
        InvalidValue: the model has layers without full attention.
    """

    def __init__(self, model: PreTrainedModel, ends: frozenset[int], *, kept: int) -> None:
        check_layers(model)
        self.rows: list[Row] = []
        self._model = model
        forward = getattr(model, "get_base_model", lambda: model)().forward  # below peft's adapters
        # transformers 5.24 renamed the argument
        self._cache_name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
        self._ends = ends
        self._store = PrefixStore(kept)
        self._layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._lengths: list[int] = []
        self._cache: Cache = None
        self._logits: torch.Tensor = None

    def admit(self, row: Row) -> None:
        """Read a row's prompt, and add it to the running rows."""
        import torch  # noqa: PLC0415 - an extra

        known, row.cached = self._store.longest(row.prompt)
        cache = growing_cache(known or self._layers)
        rest = torch.tensor([row.prompt[row.cached :]], dtype=torch.long, device=self._model.device)
        positions = torch.arange(row.cached, len(row.prompt), device=self._model.device)[None]
        with torch.inference_mode():
            self._join(row, cache, self._run(cache, input_ids=rest, position_ids=positions, logits_to_keep=1))

    def step(self) -> list[Row]:
        """Sample one token per row; remove and return the finished rows."""
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
        """Remove rows."""
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
        """Drop all rows and caches, after a change of the weights."""
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
        """Run the model on the latest sampled tokens."""
        import torch  # noqa: PLC0415 - an extra

        device = self._model.device
        ids = torch.tensor([[row.sampled[-1]] for row in self.rows], device=device)
        lengths = torch.tensor(self._lengths, device=device)[:, None]
        width = int(lengths.max()) + 1
        # the first columns of a row are padding; the last is the new token
        mask = (torch.arange(width, device=device)[None] >= width - 1 - lengths).long()
        self._logits = self._run(self._cache, input_ids=ids, attention_mask=mask, position_ids=lengths)
        self._lengths = [length + 1 for length in self._lengths]

    def _run(self, cache: Cache, **inputs: object) -> torch.Tensor:
        """Run the model on new tokens, which extends the cache; return the last token's logits of every row."""
        output = self._model(**inputs, use_cache=True, **{self._cache_name: cache})
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _of(self, number: int) -> list[KeysValues]:
        """Return the keys and values of one row's tokens, without padding."""
        start = max(self._lengths) - self._lengths[number]
        chosen = slice(number, number + 1)
        return [(keys[chosen, :, start:], values[chosen, :, start:]) for keys, values in contents(self._cache)]
