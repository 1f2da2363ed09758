"""The body of a request that the proxy of a sandbox passes on: written anew, and followed by nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from . import rules

CHUNK = 1 << 16
"""Bytes that are read at once."""
SECOND = "a second request on the same connection"
"""Why one is refused."""


class Body:
    """The body of a request, as it is sent on.

    Args:
        source: where it comes from.
        data: what has come already.
        length: how long it is; None for one in chunks.
    """

    def __init__(self, source: socket.socket, data: bytes, length: int | None) -> None:
        self._source = source
        self._data = data
        self._length = length

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, and then a look at whether more comes, which no request may be followed by.

        Raises:
            EOFError: it was cut off.
            RefusedError: it is malformed, or more comes.
        """
        async for piece in self._chunks() if self._length is None else self._counted(self._length):
            yield piece
        with contextlib.suppress(EOFError):
            if not self._data:
                await self._fill()
            raise rules.RefusedError(SECOND)

    async def _counted(self, count: int) -> AsyncIterator[bytes]:
        while count:
            if not self._data:
                await self._fill()
            piece, self._data = self._data[:count], self._data[count:]
            count -= len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := rules.chunk_size(await self._line()):
            yield f"{size:x}\r\n".encode()
            async for piece in self._counted(size):
                yield piece
            yield b"\r\n"
            if await self._line():
                raise rules.RefusedError("a chunk that is longer than it says")
        if await self._line():
            raise rules.RefusedError("header fields after a body")
        yield b"0\r\n\r\n"

    async def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            if len(self._data) > rules.MOST_CHUNK_LINE:
                raise rules.RefusedError("a line of a body in chunks that does not end")
            await self._fill()
        line, _, self._data = self._data.partition(b"\r\n")
        return line

    async def _fill(self) -> None:
        piece = await asyncio.get_running_loop().sock_recv(self._source, CHUNK)
        if not piece:
            raise EOFError
        self._data += piece
