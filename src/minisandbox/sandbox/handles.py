"""What both colours of a handle share: what they ask of a sandbox's core, and the calls that their verbs become."""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Generic, Protocol, TypeVar

from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError, SandboxGone
from minisandbox.host import registry
from minisandbox.sandbox import transfers
from minisandbox.sandbox.arguments import check_path, check_timeout, check_type
from minisandbox.sandbox.core import info_of
from minisandbox.sandbox.patching import MOST_FOUND, WHOLE_PATCH, WRITTEN_PATCH, Written, checked_patch, written_files
from minisandbox.sandbox.processes import Lifetime, ProcessChannel, ShellChannel
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.sandbox.wire import Call, ExecCall, Operation, encoded, environment_for
from minisandbox.types import Change, ExecResult, ImageSpec, Limits, Outcome, Refusals, SandboxInfo, Terminal

T = TypeVar("T")
_LOOKING = 30.0
"""Seconds after which git is asked to look at everything instead."""


class SandboxCore(Protocol):
    """The life of a sandbox as the handles see it: :class:`.core.Core`, an attached one's, or a test's fake."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def image(self) -> ImageSpec:
        """What is inside."""

    @property
    def limits(self) -> Limits:
        """What it may use."""

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of a command."""

    @property
    def owned(self) -> bool:
        """Whether this process made it."""

    @property
    def created_in(self) -> float:
        """Seconds that creation took."""

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""

    @property
    def abandoned(self) -> bool:
        """Whether this process made it and never stopped it."""

    def open_job(self, *, wait: bool = True) -> socket.socket:
        """A connected stream socket for one call; BlockingIOError where that would have to wait and may not."""

    def check_alive(self) -> None:
        """Raise SandboxGone if the sandbox has ended."""

    def stop(self) -> None:
        """End it."""

    def let_go(self) -> None:
        """What leaving a ``with`` block does."""

    def info(self) -> SandboxInfo:
        """What is known about it."""

    def refusals(self) -> Refusals:
        """What its network's allow-list has kept from it."""

    def snapshot(self) -> Snapshot:
        """Seal its state."""

    def fork(self, count: int) -> Sequence[SandboxCore]:
        """Sandboxes over its sealed state."""

    def reset(self, to: Snapshot | None) -> None:
        """Go back."""

    def changes(self, below: PurePosixPath, timeout: float | None, most: int = ...) -> tuple[Change, ...]:
        """What differs from its image, at a path and below it."""

    def processes(self) -> tuple[str, ...]:
        """Processes that can be taken hold of."""

    def process_door(self, process_id: str) -> socket.socket:
        """A listening socket at which others can connect to a process."""

    def connect_process(self, process_id: str) -> socket.socket:
        """A connection to a process."""


# --- driving ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    """What an operation returned."""

    value: T


def advance(operation: Operation[T]) -> Call | Returned[T]:
    """The next call of an operation, or its value. StopIteration cannot pass through a coroutine (PEP 479)."""
    try:
        return next(operation)
    except StopIteration as end:
        return Returned(end.value)


def conclude(core: SandboxCore, call: Call) -> None:
    """Deal with a peer that hung up before it had answered.

    Raises:
        SandboxGone: because the sandbox has ended.
    """
    if not call.done:
        core.check_alive()
        call.hung_up()


def give_up(core: SandboxCore) -> SandboxGone:
    """A sandbox does not answer: stop it, if it is ours to stop; returns the error that says so."""
    if not core.owned:
        return SandboxGone(f"sandbox {core.id} does not answer", reason="it hangs")
    core.stop()
    return SandboxGone(f"sandbox {core.id} did not answer and was stopped", reason="it hangs")


# --- verbs -----------------------------------------------------------------------------------------------------------


def live_sandboxes(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
    """Every live sandbox of this user, whoever owns it.

    Args:
        labels: only those that have all of these labels.

    Returns:
        What is known about each, the oldest first.
    """
    wanted = set((labels or {}).items())
    found = (info_of(record) for record in registry.live_records(registry.runtime_directory()))
    return tuple(sorted((one for one in found if wanted <= set(one.labels)), key=lambda one: (one.created, one.id)))


def directory(core: SandboxCore, path: str | PurePosixPath | None) -> str:
    """Where a command starts.

    Raises:
        InvalidValue: it is no path inside.
    """
    if path is not None:
        check_path("cwd", path)
    if path is not None and b"\0" in encoded(str(path)):
        raise InvalidValue(f"cwd is {str(path)!r}", reason="it has a NUL character", hint="give a directory inside")
    return str(core.image.workdir if path is None else core.image.workdir / path)


def run(
    core: SandboxCore,
    command: str | Sequence[str],
    *,
    timeout: float | None = None,
    cwd: str | PurePosixPath | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | str | None = None,
    user: str | int | None = None,
) -> Operation[ExecResult]:
    """Run a command; see :meth:`minisandbox.Sandbox.exec`."""
    if stdin is not None:
        check_type("stdin", stdin, (bytes, bytearray, memoryview, str), "bytes or a str")
    call = ExecCall(
        command,
        env=environment_for(core.environment, env, user),
        cwd=directory(core, cwd),
        timeout=timeout,
        stdin=encoded(stdin) if isinstance(stdin, str) else stdin,
        output=core.limits.output,
        user=user,
    )
    yield call
    return call.result()


def process_channel(
    core: SandboxCore,
    command: str | Sequence[str],
    *,
    timeout: float | None,
    cwd: str | PurePosixPath | None,
    env: Mapping[str, str] | None,
    user: str | int | None,
    pty: Terminal | None,
    lifetime: Lifetime,
) -> ProcessChannel:
    """What starts a process; see :meth:`minisandbox.Sandbox.start`."""
    return ProcessChannel(
        command,
        id=f"process-{secrets.token_hex(4)}",
        env=environment_for(core.environment, env, user),
        cwd=directory(core, cwd),
        timeout=timeout,
        user=user,
        pty=pty,
        lifetime=lifetime,
        output=core.limits.output,
    )


def shell_channel(
    core: SandboxCore,
    *,
    cwd: str | PurePosixPath | None,
    env: Mapping[str, str] | None,
    user: str | int | None,
) -> ShellChannel:
    """What starts a shell; see :meth:`minisandbox.Sandbox.shell`."""
    return ShellChannel(
        env=environment_for(core.environment, env, user),
        cwd=directory(core, cwd),
        user=user,
        output=core.limits.output,
    )


def find_written(
    core: SandboxCore, path: str | PurePosixPath | None, *, base: str | None, timeout: float | None
) -> Written | None:
    """What of a repository git has to look at for a patch, or None where it has to look at all of it.

    It blocks for as long as it takes to make a sandbox that looks.
    """
    check_timeout(timeout)
    if path is not None:
        check_path("path", path)
    image = core.image
    if not image.clean or (base or image.base_commit) != image.base_commit:
        return None
    if PurePosixPath(path or image.workdir) != image.workdir:
        return None
    try:
        changes = core.changes(image.workdir, _LOOKING if timeout is None else min(timeout, _LOOKING), MOST_FOUND)
    except (MiniSandboxError, OSError):  # who asks all of it tells the reason, if it is one for that too
        return None
    return written_files(changes, image.workdir) if core.alive else None


def make_patch(
    core: SandboxCore,
    path: str | PurePosixPath | None,
    written: Written | None,
    *,
    base: str | None,
    limit: int | None,
    timeout: float | None,
) -> Operation[bytes]:
    """Compare a repository with a commit; see :meth:`minisandbox.Sandbox.patch`.

    Args:
        core: the sandbox.
        path: the repository.
        written: what of it git has to look at; None: all of it.
        base: the commit.
        limit: most bytes of the patch.
        timeout: wall seconds that git has.
    """
    if written is not None and not written.any:
        return b""
    work = f"/tmp/patch.{secrets.token_hex(8)}"  # noqa: S108 - in the sandbox; nobody knows it beforehand
    script, more = (WHOLE_PATCH, []) if written is None else (WRITTEN_PATCH, written.arguments())
    command = ["bash", "-c", script, "patch", base or core.image.base_commit, work, *more]
    result = yield from _run_as_owner(core, command, path, timeout)
    sink = io.BytesIO()
    discard = transfers.remove(work, cwd="/", recursive=True, missing_ok=True)
    try:
        if result.ok:
            yield from transfers.read(f"{work}/patch", cwd="/", limit=limit, sink=sink)
    except FileAccessError:  # not finally: who is interrupted carries out no further call
        yield from discard
        raise
    yield from discard
    if written is not None and result.outcome is Outcome.EXITED and not result.ok:  # git leaves out what it cannot take
        return (yield from make_patch(core, path, None, base=base, limit=limit, timeout=timeout))
    return checked_patch(result, sink.getvalue())


def _run_as_owner(
    core: SandboxCore, command: Sequence[str], path: str | PurePosixPath | None, timeout: float | None
) -> Operation[ExecResult]:
    """Run git as whose a repository is: it refuses those of others, and runs what their settings name."""
    owner = 0
    with contextlib.suppress(FileAccessError):  # git will say why
        owner = (yield from transfers.stat(".", cwd=directory(core, path))).uid
    if owner != 0:
        with contextlib.suppress(InvalidValue):  # there is one id only, and the owner has none
            return (yield from run(core, command, cwd=path, timeout=timeout, user=owner))
    return (yield from run(core, command, cwd=path, timeout=timeout))


def warn_abandoned(handle: object, sandbox_id: str) -> None:
    """Tell of a sandbox that nobody can reach any more and nobody stopped."""
    warnings.warn(
        f"sandbox {sandbox_id} was never stopped; use a with block", ResourceWarning, stacklevel=3, source=handle
    )
