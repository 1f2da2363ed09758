"""Snapshots: sealed states of a workspace, shared by all sandboxes created from them."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Sequence
from typing import Self

from minisandbox.errors import InvalidValue
from minisandbox.launch.plan import BYTES_PER_FILE
from minisandbox.sandbox.launcher import Launcher
from minisandbox.sandbox.plans import LEAST_DISK
from minisandbox.sandbox.uppers import UpperDirectory, sweep
from minisandbox.store.leases import Lease
from minisandbox.types import ImageSpec

MOST_TREES = 200
"""Sealed trees one over the other: a message passes at most 253 descriptors (SCM_MAX_FD, include/net/scm.h)."""

_OWN_FILES = 64
"""Files that each has before anything is written, about half of them."""


class Tree:
    """The sealed upper of one sandbox: a mount that lives as long as this object, or a sandbox created from it.

    Args:
        launcher: who made the sandbox.
        descriptor: of the mount; it is never used as a path here, because an agent has shaped what lies below it.
        upper: the directory on disk that it shows, or None for memory.
    """

    _descriptor, _number = -1, 0  # of one that a signal's handler has kept from being made

    def __init__(self, launcher: Launcher, descriptor: int, upper: UpperDirectory | None = None) -> None:
        self.launcher = launcher
        self.upper = upper
        self._descriptor = descriptor
        self._number = self._held = 0
        self._lock = threading.Lock()

    def number(self) -> int:
        """Return the launcher's number of it; from now on sandboxes can be created over it.

        Raises:
            SandboxCreationError: the kernel refused, or the launcher is gone.
        """
        with self._lock:
            if not self._number:
                self._number = self.launcher.hold(self._descriptor)
            return self._number

    def held(self) -> int:
        """Bytes of ``Limits.disk`` that it takes: all its sandbox wrote, below /run and /dev/shm too."""
        with self._lock:
            if self._descriptor < 0:
                return self._held
            return self._taken()

    def seal(self) -> None:
        """Nothing writes to it any more; sandboxes are made over it."""
        self.number()
        with self._lock:
            if self._descriptor >= 0:
                self._held = self._taken()
                self._close()

    def _taken(self) -> int:
        return self.launcher.measure(self._descriptor) if self.upper else _taken(self._descriptor)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        """Give it up."""
        self._close()
        if self._number:
            self.launcher.forget(self._number)


def _taken(descriptor: int) -> int:
    """Return the bytes in use of a file system; the memory of its files counts if that is more."""
    info = os.fstatvfs(descriptor)
    files = info.f_files - info.f_ffree - _OWN_FILES
    return max((info.f_blocks - info.f_bfree) * info.f_frsize, files * BYTES_PER_FILE)


def check_room(trees: Sequence[Tree], disk: int, what: str) -> None:
    """Refuse to build on sealed trees that leave nothing of ``Limits.disk`` to be written.

    Raises:
        InvalidValue: the trees leave nothing to write.
    """
    held = sum(tree.held() for tree in trees)
    if trees and disk - held < LEAST_DISK:
        raise InvalidValue(
            f"{what}: sealed states hold {held} bytes of {'disk' if trees[0].upper else 'memory'}, "
            f"and Limits.disk is {disk}",
            reason=f"what is sealed stays, files that were deleted or overwritten since included; "
            f"each counts {BYTES_PER_FILE} bytes at least",
            hint="reset() to an earlier state, begin anew from the image, or give a higher Limits.disk",
        )


class Snapshot:
    """The sealed state of a workspace: what sandboxes can be made over, and what a workspace can be reset to.

    It costs nothing beyond what the workspace had written, however many sandboxes share it, and lives until it is
    closed and the last sandbox made over it has ended, or its owner's process has. That is memory (before Linux 6.6
    the store's disk), up to ``Limits.disk`` for all that lies one over the other, of which ``Limits.memory`` counts
    nothing. Made by :meth:`minisandbox.Sandbox.snapshot`.

    Attributes:
        id: its name.
        image: what lies below it.
        created: seconds since the epoch.
    """

    def __init__(
        self, identifier: str, image: ImageSpec, created: float, trees: tuple[Tree, ...], lease: Lease | None = None
    ) -> None:
        self.id = identifier
        self.image = image
        self.created = created
        self._trees: tuple[Tree, ...] | None = trees
        self._lease = lease

    def trees(self) -> tuple[Tree, ...]:
        """Return the sealed trees, the lowest first.

        Raises:
            InvalidValue: the snapshot is closed.
        """
        if self._trees is None:
            raise InvalidValue(f"snapshot {self.id} is closed", hint="close it when nothing more is made over it")
        return self._trees

    def close(self) -> None:
        """Release it and its memory; sandboxes created from it run on. Calling it again does nothing."""
        launcher = self._trees[0].launcher if self._trees else None
        self._trees = None
        if self._lease is not None:
            self._lease.release()
        if launcher is not None:
            launcher.flush()
            sweep()

    def __enter__(self) -> Self:
        """Use the snapshot in a ``with`` block; it is closed at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the snapshot."""
        self.close()
