"""Create sandboxes ahead of their use, so that the next work items need not wait for a start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from minisandbox.sandbox import AsyncSandbox

Key = TypeVar("Key", bound=Hashable)
Make = Callable[[], Awaitable[AsyncSandbox]]


class WarmPool(Generic[Key]):
    """Pool of sandboxes that are created ahead; each is handed out at most once.

    Args:
        size: maximum number of sandboxes that are created ahead.
        starts: maximum number of concurrent creations.
    """

    def __init__(self, size: int, starts: int) -> None:
        self._size = size
        self._starts = asyncio.Semaphore(starts)
        self._ahead: dict[Key, asyncio.Task[AsyncSandbox]] = {}

    @property
    def ahead(self) -> int:
        """Number of sandboxes in the pool, including those being created."""
        return len(self._ahead)

    def expect(self, key: Key, make: Make) -> bool:
        """Start to create a sandbox that :meth:`take` will request soon.

        Args:
            key: key of the later :meth:`take`.
            make: creates the sandbox.

        Returns:
            Whether the pool has a sandbox for the key, ready or being created; False if the pool is full.
        """
        if key not in self._ahead:
            if len(self._ahead) >= self._size:
                return False
            self._ahead[key] = asyncio.create_task(self._made(make))
        return True

    async def take(self, key: Key, make: Make) -> AsyncSandbox:
        """Hand out the sandbox that was created ahead for a key, or a new one; the caller has to stop it.

        Args:
            key: key of the sandbox.
            make: creates the sandbox if none was created ahead.

        Raises:
            MiniSandboxError: the sandbox could not be created, now or ahead.
            OSError: a system call failed while the sandbox was created.
        """
        task = self._ahead.pop(key, None)
        if task is None:
            return await self._made(make)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _undo(task)
            raise

    async def discard(self, key: Key) -> None:
        """Stop the sandbox that was created ahead for a key, if there is one."""
        if (task := self._ahead.pop(key, None)) is not None:
            await _undo(task)

    async def close(self) -> None:
        """Stop all sandboxes that were not taken, even if the caller is cancelled meanwhile."""
        tasks, self._ahead = list(self._ahead.values()), {}
        await asyncio.gather(*map(_undo, tasks))

    async def _made(self, make: Make) -> AsyncSandbox:
        async with self._starts:
            return await make()


async def _undo(task: asyncio.Task[AsyncSandbox]) -> None:
    """Cancel the creation of a sandbox, or stop the sandbox if it is already created."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        box = await task
        await box.stop()
