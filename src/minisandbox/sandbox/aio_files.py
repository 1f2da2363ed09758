"""The file verbs of the asynchronous sandbox."""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath

from minisandbox.sandbox import transfers
from minisandbox.sandbox.aio_drive import carry_out
from minisandbox.sandbox.handles import SandboxCore
from minisandbox.sandbox.wire import encoded
from minisandbox.types import FileInfo, GiB, MiB, Transfer


class AsyncFiles:
    """As :class:`.Files`. A verb that is cancelled ends inside at once; a download leaves nothing behind.

    Args:
        core: the sandbox.
    """

    def __init__(self, core: SandboxCore) -> None:
        self._core = core
        self._cwd = str(core.image.workdir)

    async def read_bytes(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> bytes:
        """As :meth:`.Files.read_bytes`."""
        sink = io.BytesIO()
        await carry_out(self._core, transfers.read(path, cwd=self._cwd, limit=limit, sink=sink))
        return sink.getvalue()

    async def read_text(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> str:
        """As :meth:`.Files.read_text`."""
        return (await self.read_bytes(path, limit=limit)).decode("utf-8", "replace")

    async def write_bytes(self, path: str | PurePosixPath, data: bytes, *, mode: int | None = None) -> None:
        """As :meth:`.Files.write_bytes`."""
        await carry_out(self._core, transfers.write(path, cwd=self._cwd, mode=mode, source=(data,)))

    async def write_text(self, path: str | PurePosixPath, text: str, *, mode: int | None = None) -> None:
        """As :meth:`.Files.write_text`."""
        await self.write_bytes(path, encoded(text), mode=mode)

    async def list(self, path: str | PurePosixPath | None = None) -> tuple[FileInfo, ...]:
        """As :meth:`.Files.list`."""
        return await carry_out(self._core, transfers.list_directory("." if path is None else path, cwd=self._cwd))

    async def stat(self, path: str | PurePosixPath, *, follow: bool = True) -> FileInfo:
        """As :meth:`.Files.stat`."""
        return await carry_out(self._core, transfers.stat(path, cwd=self._cwd, follow=follow))

    async def exists(self, path: str | PurePosixPath) -> bool:
        """As :meth:`.Files.exists`."""
        return await carry_out(self._core, transfers.exists(path, cwd=self._cwd))

    async def mkdir(
        self, path: str | PurePosixPath, *, mode: int = 0o755, parents: bool = True, exist_ok: bool = True
    ) -> None:
        """As :meth:`.Files.mkdir`."""
        operation = transfers.make_directory(path, cwd=self._cwd, mode=mode, parents=parents, exist_ok=exist_ok)
        await carry_out(self._core, operation)

    async def remove(self, path: str | PurePosixPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """As :meth:`.Files.remove`."""
        operation = transfers.remove(path, cwd=self._cwd, recursive=recursive, missing_ok=missing_ok)
        await carry_out(self._core, operation)

    async def move(self, source: str | PurePosixPath, target: str | PurePosixPath) -> None:
        """As :meth:`.Files.move`."""
        await carry_out(self._core, transfers.move(source, target, cwd=self._cwd))

    async def upload(self, local: str | Path, path: str | PurePosixPath, *, mode: int | None = None) -> Transfer:
        """As :meth:`.Files.upload`. Host files are read in a thread, a piece at a time."""
        return await carry_out(self._core, transfers.upload(local, path, cwd=self._cwd, mode=mode), disk=True)

    async def download(self, path: str | PurePosixPath, local: str | Path, *, limit: int | None = 2 * GiB) -> Transfer:
        """As :meth:`.Files.download`. Host files are written in a thread, a piece at a time."""
        return await carry_out(self._core, transfers.download(path, local, cwd=self._cwd, limit=limit), disk=True)
