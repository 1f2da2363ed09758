"""Define the interface of sandbox backends, and helpers that sync and async handles share."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Generic, Protocol, TypeVar

from minisandbox.errors import SandboxGone
from minisandbox.sandbox.protocol.wire import Call, Operation
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import Change, ImageSpec, Limits, Refusals, SandboxInfo

T = TypeVar("T")


class SandboxCore(Protocol):
    """The backend of a handle: :class:`.core.Core`, an attached sandbox, a container, or a fake."""

    @property
    def id(self) -> str:
        """Id of the sandbox, unique on this machine."""

    @property
    def image(self) -> ImageSpec:
        """The image of the sandbox."""

    @property
    def limits(self) -> Limits:
        """The resource limits of the sandbox."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every command."""

    @property
    def owned(self) -> bool:
        """Whether this process created the sandbox."""

    @property
    def created_in(self) -> float:
        """Seconds that creation took."""

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""

    @property
    def abandoned(self) -> bool:
        """Whether this process created the sandbox and has not stopped it."""

    def open_job(self, *, wait: bool = True) -> socket.socket:
        """Connect a stream socket for one call; raise BlockingIOError if that must wait and ``wait`` is False."""

    def check_alive(self) -> None:
        """Raise SandboxGone if the sandbox has ended."""

    def stop(self) -> None:
        """Stop the sandbox."""

    def leave(self) -> None:
        """Leave a ``with`` block: stop an owned sandbox, or close the handle of an attached one."""

    def info(self) -> SandboxInfo:
        """Return the recorded facts about the sandbox."""

    def refusals(self) -> Refusals:
        """Return the requests that the network's allow-list has refused."""

    def snapshot(self) -> Snapshot:
        """Seal the current state of the sandbox, and continue on top of it."""

    def fork(self, count: int) -> Sequence[SandboxCore]:
        """Create sandboxes from the current state."""

    def reset(self, to: Snapshot | None) -> None:
        """Return to an earlier state, or to the initial one."""

    def changes(self, below: PurePosixPath, timeout: float | None, max_characters: int = ...) -> tuple[Change, ...]:
        """Return the changes to the image at a path and below it."""

    def processes(self) -> tuple[str, ...]:
        """Return the ids of the processes that a handle can attach to."""

    def process_listener(self, process_id: str) -> socket.socket:
        """Open a listening socket through which other handles can attach to a process."""

    def connect_process(self, process_id: str) -> socket.socket:
        """Connect to the listening socket of a process."""


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    """The value that an operation returned."""

    value: T


def advance(operation: Operation[T]) -> Call | Returned[T]:
    """Return the next call of an operation, or its return value; coroutines cannot raise StopIteration (PEP 479)."""
    try:
        return next(operation)
    except StopIteration as end:
        return Returned(end.value)


def conclude(core: SandboxCore, call: Call) -> None:
    """Handle a call whose peer hung up before it answered.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    if not call.done:
        core.check_alive()
        call.hung_up()


def mark_unresponsive(core: SandboxCore) -> SandboxGone:
    """Stop a sandbox that does not answer, if this process owns it; return the error to raise."""
    if not core.owned:
        return SandboxGone(f"sandbox {core.id} does not answer", reason="it hangs")
    core.stop()
    return SandboxGone(f"sandbox {core.id} did not answer and was stopped", reason="it hangs")


def warn_abandoned(handle: object, sandbox_id: str) -> None:
    """Warn that a sandbox is garbage-collected without having been stopped."""
    warnings.warn(
        f"sandbox {sandbox_id} was never stopped; use a with block", ResourceWarning, stacklevel=3, source=handle
    )
