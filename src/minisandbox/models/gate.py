"""Limits for the number and rate of concurrent requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from minisandbox.errors import InvalidValue

_SPREAD = 0.1  # spreads requests that waited for the same moment


class Gate:
    """A limit that every try of every request passes.

    Args:
        concurrency: maximum concurrent tries.
        per_minute: maximum tries started per minute, evenly spaced; None for no limit.
    """

    def __init__(self, concurrency: int, per_minute: float | None = None) -> None:
        if concurrency < 1:
            raise InvalidValue(f"concurrency is {concurrency!r}", hint="give 1 or more")
        if per_minute is not None and not per_minute > 0:
            raise InvalidValue(f"per_minute is {per_minute!r}", hint="give a positive number, or None for no limit")
        self._slots = asyncio.Semaphore(concurrency)
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._closed_until = 0.0

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait for a slot; the block is the try."""
        async with self._slots:
            turn = max(time.monotonic(), self._next)
            self._next = turn + self._gap
            while (wait := max(turn, self._closed_until) - time.monotonic()) > 0:
                await asyncio.sleep(wait if turn >= self._closed_until else spread(wait))
            yield

    def shut(self, seconds: float) -> None:
        """Block all requests for some seconds, after the server asked one of them to wait."""
        self._closed_until = max(self._closed_until, time.monotonic() + seconds)


class Turns:
    """Admits one task per turn of the event loop: parsing a hundred responses at once would block it for 0.1 s."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Wait for this task's turn."""
        async with self._lock:
            await asyncio.sleep(0)


def spread(seconds: float) -> float:
    """Return a randomly longer time, by at most a tenth."""
    return seconds * random.uniform(1.0, 1.0 + _SPREAD)  # noqa: S311 - jitter, not a secret
