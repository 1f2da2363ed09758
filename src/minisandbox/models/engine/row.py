"""A response being sampled, and the interface of the loops that sample several together."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisandbox.models.protocol import FinishReason, Sampling


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

    def append(self, token: int, logprob: float, ends: frozenset[int]) -> None:
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
