"""The protocol of a sandbox backend, and how sync and async handles step through an operation."""

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
        """Connect a stream socket for one call; BlockingIOError if that would have to wait and may not."""

    def check_alive(self) -> None:
        """Raise SandboxGone if the sandbox has ended."""

    def stop(self) -> None:
        """End it."""

    def leave(self) -> None:
        """Do what leaving a ``with`` block does."""

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

    def changes(self, below: PurePosixPath, timeout: float | None, max_characters: int = ...) -> tuple[Change, ...]:
        """Return the changes to its image at a path and below it."""

    def processes(self) -> tuple[str, ...]:
        """Processes that a handle can attach to."""

    def process_listener(self, process_id: str) -> socket.socket:
        """Open a listening socket at which others can connect to a process."""

    def connect_process(self, process_id: str) -> socket.socket:
        """Connect to a process."""


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    """The value that an operation returned."""

    value: T


def advance(operation: Operation[T]) -> Call | Returned[T]:
    """Return an operation's next call, or its value. StopIteration cannot pass through a coroutine (PEP 479)."""
    try:
        return next(operation)
    except StopIteration as end:
        return Returned(end.value)


def conclude(core: SandboxCore, call: Call) -> None:
    """Handle a peer that hung up before it answered.

    Raises:
        SandboxGone: because the sandbox has ended.
    """
    if not call.done:
        core.check_alive()
        call.hung_up()


def mark_unresponsive(core: SandboxCore) -> SandboxGone:
    """Stop a sandbox that does not answer, if this process owns it; return the error that says so."""
    if not core.owned:
        return SandboxGone(f"sandbox {core.id} does not answer", reason="it hangs")
    core.stop()
    return SandboxGone(f"sandbox {core.id} did not answer and was stopped", reason="it hangs")


def warn_abandoned(handle: object, sandbox_id: str) -> None:
    """Warn about a sandbox that was never stopped and is garbage now."""
    warnings.warn(
        f"sandbox {sandbox_id} was never stopped; use a with block", ResourceWarning, stacklevel=3, source=handle
    )
