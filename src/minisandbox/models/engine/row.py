"""The state of one response while it is sampled, and the interface of decoders, which sample several at once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisandbox.models.protocol import FinishReason, Sampling


@dataclass(slots=True, eq=False)
class Row:
    """A row of the batch: one response while it is sampled.

    Attributes:
        prompt: the ids of the prompt's tokens.
        sampling: the sampling options.
        limit: maximum number of sampled tokens.
        stopped: a function that returns whether the sampled tokens contain a stop text; None without stop texts.
        sampled: the ids of the tokens sampled so far.
        logprobs: the log-probabilities of the sampled tokens.
        finish: the finish reason; None while the response is incomplete.
        cached: the number of prompt tokens that came from the cache.
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
        """Return the row's next random number in [0, 1)."""
        return self._random.random()

    def append(self, token: int, logprob: float, ends: frozenset[int]) -> None:
        """Append a sampled token, and check whether it ends the response."""
        self.sampled.append(token)
        self.logprobs.append(logprob)
        if token in ends or (self.stopped is not None and self.stopped(self.sampled)):
            self.finish = "stop"
        elif len(self.sampled) >= self.limit:
            self.finish = "length"


class Decoding(Protocol):
    """The interface of a decoder, which samples several responses together. Use it from one thread only."""

    @property
    def rows(self) -> Sequence[Row]:
        """The running rows."""
        ...

    def admit(self, row: Row) -> None:
        """Add a row to the running rows."""
        ...

    def step(self) -> list[Row]:
        """Sample further tokens of the running rows; remove and return the finished rows."""
        ...

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows without finishing their responses."""
        ...

    def forget(self) -> None:
        """Drop all rows and caches, because the model's weights have changed."""
        ...
