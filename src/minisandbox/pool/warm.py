"""Warm sandboxes: created ahead for the next work items, each used at most once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from minisandbox.sandbox import AsyncSandbox

Key = TypeVar("Key", bound=Hashable)
Make = Callable[[], Awaitable[AsyncSandbox]]


class WarmPool(Generic[Key]):
    """Makes sandboxes, some of them before they are asked for.

    Args:
        size: how many are made ahead at most.
        starts: how many are being made at once.
    """

    def __init__(self, size: int, starts: int) -> None:
        self._size = size
        self._starts = asyncio.Semaphore(starts)
        self._ahead: dict[Key, asyncio.Task[AsyncSandbox]] = {}

    @property
    def ahead(self) -> int:
        """How many wait to be taken, or are being made for that."""
        return len(self._ahead)

    def expect(self, key: Key, make: Make) -> bool:
        """Begin to make a sandbox that will be asked for soon.

        Args:
            key: what it will be asked for by.
            make: makes it.

        Returns:
            Whether there is room: one for this key is there, or being made.
        """
        if key not in self._ahead:
            if len(self._ahead) >= self._size:
                return False
            self._ahead[key] = asyncio.create_task(self._made(make))
        return True

    async def take(self, key: Key, make: Make) -> AsyncSandbox:
        """Return a sandbox that is the caller's own: the one made ahead for the key, or a new one.

        Args:
            key: whose it is.
            make: makes it, if none was made ahead.

        Raises:
            MiniSandboxError: the sandbox could not be created, now or ahead.
            OSError: the same.
        """
        task = self._ahead.pop(key, None)
        if task is None:
            return await self._made(make)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _undo(task)
            raise

    async def close(self) -> None:
        """Stop sandboxes that were not taken, to the end even if this is cancelled."""
        tasks, self._ahead = list(self._ahead.values()), {}
        await asyncio.gather(*map(_undo, tasks))

    async def _made(self, make: Make) -> AsyncSandbox:
        async with self._starts:
            return await make()


async def _undo(task: asyncio.Task[AsyncSandbox]) -> None:
    """Cancel the making of a sandbox, and stop it if that comes too late."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        box = await task
        await box.stop()
