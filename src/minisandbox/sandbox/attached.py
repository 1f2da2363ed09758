"""Connect to a sandbox that another process owns, through its listening socket."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NoReturn

from minisandbox.errors import NotFound, OwnerOnly, SandboxGone
from minisandbox.host import listeners, registry
from minisandbox.sandbox.core import info_of, reach_process, unreachable
from minisandbox.sandbox.run import end_process, readable
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import ImageSpec, Limits, Refusals, SandboxInfo


class AttachedCore:
    """The backend of a handle on a sandbox that another process of this user owns. Create it with :meth:`attach`.

    Attributes:
        id: id of the sandbox, unique on this machine.
        image: its image, with the fields that a handle needs and without layers.
        limits: its limits; only ``output`` is known.
        environment: environment variables of every command.
        owned: False, because another handle created the sandbox, most likely in another process.
        created_in: 0, because only the owner knows.
    """

    owned = False
    abandoned = False
    created_in = 0.0

    def __init__(self, directory: Path, record: registry.OwnerRecord, pidfd: int) -> None:
        self.id = record.id
        workdir = PurePosixPath(record.workdir)
        self.image = ImageSpec(record.image, (), workdir=workdir, base_commit=record.base_commit, user=record.user)
        self.limits = Limits(output=record.output)
        self.environment = dict(record.environment)
        self._record = record
        self._directory = directory
        self._pidfd = pidfd

    @classmethod
    def attach(cls, sandbox_id: str) -> AttachedCore:
        """Attach to a live sandbox of this user.

        Raises:
            NotFound: there is no live sandbox with that id.
        """
        for directory, record in registry.located_records(registry.runtime_directory()):
            if record.id == sandbox_id:
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(record.pid)
                    core = cls(directory, record, pidfd)
                    if core._is_same_process():
                        return core
                    core.leave()
        raise NotFound(f"no sandbox {sandbox_id!r} is live", hint="'minisandbox sandbox ls' lists those of this user")

    def _is_same_process(self) -> bool:
        """Return whether the record still exists; otherwise the pid may have been reused before it was opened."""
        return any(record == self._record for record in registry.live_records(registry.runtime_directory()))

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""
        return not self._has_ended(0.0)

    def _has_ended(self, seconds: float) -> bool:
        pidfd = self._pidfd  # another thread may close it
        return pidfd < 0 or readable(pidfd, seconds)

    def open_job(self, *, wait: bool = True) -> socket.socket:
        """Connect a stream socket for one call.

        Args:
            wait: whether to wait if too many other connections are pending.

        Raises:
            BlockingIOError: too many connections are pending, and the call may not wait.
            SandboxGone: the sandbox has ended, or its owner has reset it.
        """
        if self._pidfd < 0:
            raise SandboxGone(f"sandbox {self.id}: this handle was closed")
        try:
            return listeners.connect(self._directory, listeners.name_of(self.id), wait=wait)
        except BlockingIOError:
            raise
        except OSError as error:
            raise unreachable(self._gone(), error) from error

    def check_alive(self) -> None:
        """Check whether the sandbox has ended, after a call was cut off.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        self._check_running(0.2)

    def _check_running(self, seconds: float = 0.0) -> None:
        """Raise SandboxGone if the sandbox has ended or ends within this many seconds."""
        if self._has_ended(seconds):
            raise self._gone()

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self.id} has ended", reason="it was stopped by its owner or killed from outside")

    def info(self) -> SandboxInfo:
        """Return the recorded facts about the sandbox.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        self._check_running()
        return info_of(self._record)

    def process_listener(self, process_id: str) -> socket.socket:
        """Open a listening socket for a process that outlives its handle.

        Raises:
            SandboxGone: the sandbox has ended.
            HostError: the socket cannot be created.
        """
        self._check_running()
        return listeners.make(self._directory, listeners.name_of(self.id, process_id))

    def connect_process(self, process_id: str) -> socket.socket:
        """Connect to the listening socket of a process.

        Raises:
            NotFound: there is no process with that id, or its socket is gone.
        """
        return reach_process(self._directory, self.id, process_id)

    def processes(self) -> tuple[str, ...]:
        """Return the ids of processes that outlive their handles.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        self._check_running()
        return listeners.process_ids(self._directory, self.id)

    def snapshot(self) -> Snapshot:
        """Raise OwnerOnly, because only the owner can do this.

        Raises:
            OwnerOnly: always.
        """
        self._refuse("a snapshot")

    def fork(self, count: int) -> NoReturn:  # noqa: ARG002 - the same method as an owner's
        """Raise OwnerOnly, because only the owner can do this.

        Raises:
            OwnerOnly: always.
        """
        self._refuse("fork")

    def reset(self, to: Snapshot | None) -> None:  # noqa: ARG002 - the same method as an owner's
        """Raise OwnerOnly, because only the owner can do this.

        Raises:
            OwnerOnly: always.
        """
        self._refuse("reset")

    def changes(self, below: PurePosixPath, timeout: float | None, max_characters: int = 0) -> NoReturn:  # noqa: ARG002 - as an owner's
        """Raise OwnerOnly, because only the owner can do this.

        Raises:
            OwnerOnly: always.
        """
        self._refuse("changes")

    def refusals(self) -> Refusals:
        """Raise OwnerOnly, because only the owner can do this.

        Raises:
            OwnerOnly: always.
        """
        self._refuse("refusals")

    def _refuse(self, operation: str) -> NoReturn:
        raise OwnerOnly(
            f"{operation} of sandbox {self.id}",
            reason=f"it belongs to process {self._record.owner}",
            hint="ask for it where the sandbox was created",
        )

    def leave(self) -> None:
        """Close this handle at the end of a ``with`` block; the sandbox keeps running."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def stop(self) -> None:
        """Stop the sandbox, for its owner too; calling it again does nothing.

        Raises:
            SandboxGone: a process of the sandbox hangs in the kernel and did not exit.
        """
        if self._pidfd < 0:
            return
        end_process(self._pidfd, self.id)
        self.leave()

    def __del__(self) -> None:
        """Close the handle."""
        self.leave()


def live_sandboxes(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
    """Return every live sandbox of this user, of all owners.

    Args:
        labels: return only sandboxes that have all of these labels.

    Returns:
        The facts about each sandbox, oldest first.
    """
    label_pairs = set((labels or {}).items())
    infos = (info_of(record) for record in registry.live_records(registry.runtime_directory()))
    return tuple(
        sorted((info for info in infos if label_pairs <= set(info.labels)), key=lambda info: (info.created, info.id))
    )
