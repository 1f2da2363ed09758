"""The asynchronous sandbox: the same names, the same arguments, the same results as the synchronous one.

What takes milliseconds in the kernel (to create, to stop, to seal) is done in a thread of the event loop's pool, to its
end even if the caller is cancelled meanwhile. Everything else is carried out by the running loop itself.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from minisandbox.sandbox import handles, transfers, uppers
from minisandbox.sandbox.aio_drive import carry_out, in_thread, kept_or_undone
from minisandbox.sandbox.aio_files import AsyncFiles
from minisandbox.sandbox.aio_processes import AsyncProcess
from minisandbox.sandbox.aio_shell import AsyncShell
from minisandbox.sandbox.attached import AttachedCore
from minisandbox.sandbox.core import Core
from minisandbox.sandbox.handles import SandboxCore, live_sandboxes
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import (
    Change,
    ExecResult,
    ImageSpec,
    Limits,
    MiB,
    Mount,
    Network,
    Refusals,
    SandboxInfo,
    SandboxUsage,
    Terminal,
)


class AsyncSandbox:
    """As :class:`.Sandbox`, for the tasks of an event loop. Make one with :meth:`create`.

    It is an asynchronous context manager, and ends with the process that made it.

    Args:
        core: the sandbox that this is a handle on.
    """

    def __init__(self, core: SandboxCore) -> None:
        self._core = core

    @property
    def id(self) -> str:
        """As :attr:`.Sandbox.id`."""
        return self._core.id

    @property
    def image(self) -> ImageSpec:
        """As :attr:`.Sandbox.image`."""
        return self._core.image

    @property
    def created_in(self) -> float:
        """As :attr:`.Sandbox.created_in`."""
        return self._core.created_in

    @property
    def alive(self) -> bool:
        """As :attr:`.Sandbox.alive`."""
        return self._core.alive

    @property
    def files(self) -> AsyncFiles:
        """As :attr:`.Sandbox.files`."""
        return AsyncFiles(self._core)

    @classmethod
    async def create(
        cls,
        image: ImageSpec | Snapshot,
        *,
        limits: Limits | None = None,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        upper: Path | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Self:
        """As :meth:`.Sandbox.create`. If it is cancelled, what it made is stopped first."""
        if upper is not None:
            uppers.check_limits(limits)
        core = await kept_or_undone(
            Core.stop, Core.create, image, limits=limits, network=network, mounts=mounts, environment=environment,
            upper=upper, labels=labels,
        )  # fmt: skip
        return cls(core)

    @classmethod
    async def attach(cls, id: str) -> Self:  # noqa: A002 - the same word as the property and the command line
        """As :meth:`.Sandbox.attach`."""
        core: AttachedCore = await kept_or_undone(AttachedCore.let_go, AttachedCore.attach, id)
        return cls(core)

    @staticmethod
    async def list(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """As :meth:`.Sandbox.list`."""
        return await in_thread(live_sandboxes, labels=labels)

    async def __aenter__(self) -> Self:
        """As :meth:`.Sandbox.__enter__`."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """As :meth:`.Sandbox.__exit__`, to its end even if this is cancelled."""
        await in_thread(self._core.let_go)

    def __del__(self) -> None:
        """Stop a sandbox that nobody can reach any more."""
        core = getattr(self, "_core", None)  # absent where creation failed
        if core is not None and core.abandoned:
            handles.warn_abandoned(self, core.id)
            core.stop()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """As :meth:`.Sandbox.exec`. A cancellation ends the command's whole tree; the sandbox goes on."""
        operation = handles.run(self._core, command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, user=user)
        return await carry_out(self._core, operation)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        pty: Terminal | None = None,
        lifetime: Literal["handle", "sandbox"] = "handle",
    ) -> AsyncProcess:
        """As :meth:`.Sandbox.start`. A cancellation ends what was started, whatever its lifetime."""
        channel = handles.process_channel(
            self._core, command, timeout=timeout, cwd=cwd, env=env, user=user, pty=pty, lifetime=lifetime
        )
        return await AsyncProcess._started(self._core, channel, owned=lifetime == "handle")

    async def process(self, id: str) -> AsyncProcess:  # noqa: A002 - the same word as the property
        """As :meth:`.Sandbox.process`."""
        return await AsyncProcess._reached(self._core, id)

    async def processes(self) -> tuple[str, ...]:
        """As :meth:`.Sandbox.processes`."""
        return await in_thread(self._core.processes)

    async def shell(
        self,
        *,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> AsyncShell:
        """As :meth:`.Sandbox.shell`."""
        return await AsyncShell._opened(self._core, handles.shell_channel(self._core, cwd=cwd, env=env, user=user))

    async def patch(
        self,
        path: str | PurePosixPath | None = None,
        *,
        base: str | None = None,
        limit: int | None = 100 * MiB,
        timeout: float | None = 300.0,
    ) -> bytes:
        """As :meth:`.Sandbox.patch`. A cancellation ends git inside."""
        written = await in_thread(handles.find_written, self._core, path, base=base, timeout=timeout)
        operation = handles.make_patch(self._core, path, written, base=base, limit=limit, timeout=timeout)
        return await carry_out(self._core, operation)

    async def changes(self, *, timeout: float | None = 300.0) -> tuple[Change, ...]:
        """As :meth:`.Sandbox.changes`."""
        return await in_thread(self._core.changes, PurePosixPath("/"), timeout)

    async def snapshot(self) -> Snapshot:
        """As :meth:`.Sandbox.snapshot`. It is done to its end even if this is cancelled."""
        return await kept_or_undone(Snapshot.close, self._core.snapshot)

    async def fork(self, count: int = 1) -> builtins.list[Self]:
        """As :meth:`.Sandbox.fork`. If it is cancelled, the new sandboxes are stopped first."""
        return [type(self)(core) for core in await kept_or_undone(_stop_all, self._core.fork, count)]

    async def reset(self, to: Snapshot | None = None) -> None:
        """As :meth:`.Sandbox.reset`. It is done to its end even if this is cancelled."""
        await in_thread(self._core.reset, to)

    async def usage(self) -> SandboxUsage:
        """As :meth:`.Sandbox.usage`."""
        return await carry_out(self._core, transfers.usage())

    async def refusals(self) -> Refusals:
        """As :meth:`.Sandbox.refusals`."""
        return await in_thread(self._core.refusals)

    async def info(self) -> SandboxInfo:
        """As :meth:`.Sandbox.info`."""
        return await in_thread(self._core.info)

    async def stop(self) -> None:
        """As :meth:`.Sandbox.stop`, to its end even if this is cancelled."""
        await in_thread(self._core.stop)


def _stop_all(cores: Sequence[SandboxCore]) -> None:
    for core in cores:
        core.stop()
