"""How many requests go out at once, and how fast."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from minisandbox.errors import InvalidValue

_SPREAD = 0.1  # who waited for the same moment does not come at the same moment


class Gate:
    """What every try of every request passes.

    Args:
        concurrency: tries under way at once.
        per_minute: tries that begin in a minute, evenly spaced; None for no limit.
    """

    def __init__(self, concurrency: int, per_minute: float | None = None) -> None:
        if concurrency < 1:
            raise InvalidValue(f"concurrency {concurrency!r}", hint="give 1 or more")
        if per_minute is not None and not per_minute > 0:
            raise InvalidValue(f"{per_minute!r} requests a minute", hint="give more than 0, or None for no limit")
        self._slots = asyncio.Semaphore(concurrency)
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._closed_until = 0.0

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait for one's turn; the block is the try."""
        async with self._slots:
            turn = max(time.monotonic(), self._next)
            self._next = turn + self._gap
            while (wait := max(turn, self._closed_until) - time.monotonic()) > 0:
                await asyncio.sleep(wait if turn >= self._closed_until else spread(wait))
            yield

    def shut(self, seconds: float) -> None:
        """Let nobody pass for so long: the server has asked for it, whoever it told."""
        self._closed_until = max(self._closed_until, time.monotonic() + seconds)


class Turns:
    """Lets one pass in each turn of the loop: a hundred answers that come together take a millisecond each to read."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Wait for one's turn."""
        async with self._lock:
            await asyncio.sleep(0)


def spread(seconds: float) -> float:
    """Return a little more, at random."""
    return seconds * random.uniform(1.0, 1.0 + _SPREAD)  # noqa: S311 - nothing secret: it spreads requests
