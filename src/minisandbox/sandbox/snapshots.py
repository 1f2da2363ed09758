"""Snapshots: sealed states of a workspace, which all sandboxes created from them share."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Self

from minisandbox.errors import InvalidValue
from minisandbox.launch.disk import BYTES_PER_FILE
from minisandbox.sandbox.launcher import Launcher
from minisandbox.sandbox.plans import LEAST_DISK
from minisandbox.sandbox.uppers import UpperDirectory, sweep
from minisandbox.store.leases import Lease
from minisandbox.types import ImageSpec

MOST_TREES = 200
"""Maximum depth of sealed trees, because a message passes at most 253 descriptors (SCM_MAX_FD, include/net/scm.h)."""

_OWN_FILES = 64
"""Number of inodes of an empty tmpfs that do not count as files; it has about half as many."""


class Tree:
    """The upper of one run. Its mount lives as long as this object or any sandbox created on top of it.

    Args:
        launcher: launcher of the sandbox.
        descriptor: descriptor of the mount. This process opens no path below it, because an agent wrote the content.
        upper: directory of an upper on disk, or None for an upper in memory.
    """

    _descriptor, _number = -1, 0  # for __del__, if a signal handler interrupts __init__

    def __init__(self, launcher: Launcher, descriptor: int, upper: UpperDirectory | None = None) -> None:
        self.launcher = launcher
        self.upper = upper
        self._descriptor = descriptor
        self._number = self._sealed_size = 0
        self._lock = threading.Lock()

    def number(self) -> int:
        """Return the launcher's number of the tree; the first call makes the launcher hold the tree.

        Raises:
            SandboxCreationError: the kernel refused, or the launcher is gone.
        """
        with self._lock:
            if not self._number:
                self._number = self.launcher.hold(self._descriptor)
            return self._number

    def disk_usage(self) -> int:
        """Return how many bytes of ``Limits.disk`` the tree takes: all files of its sandbox, with /run and /dev/shm."""
        with self._lock:
            if self._descriptor < 0:
                return self._sealed_size
            return self._used_size()

    def seal(self) -> None:
        """Seal the tree after its run has ended, so that sandboxes can be created on top of it."""
        self.number()
        with self._lock:
            if self._descriptor >= 0:
                self._sealed_size = self._used_size()
                self._close()

    def _used_size(self) -> int:
        return self.launcher.measure(self._descriptor) if self.upper else _used_size(self._descriptor)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        """Release the tree."""
        self._close()
        if self._number:
            self.launcher.forget(self._number)


def _used_size(descriptor: int) -> int:
    """Return the used bytes of a file system, or the memory of its inodes if that is more."""
    info = os.fstatvfs(descriptor)
    files = info.f_files - info.f_ffree - _OWN_FILES
    return max((info.f_blocks - info.f_bfree) * info.f_frsize, files * BYTES_PER_FILE)


def check_room(trees: Sequence[Tree], disk: int, subject: str) -> None:
    """Check that sealed trees leave part of ``Limits.disk`` for new files.

    Raises:
        InvalidValue: the trees use up the limit.
    """
    sealed_size = sum(tree.disk_usage() for tree in trees)
    if trees and disk - sealed_size < LEAST_DISK:
        raise InvalidValue(
            f"{subject}: sealed states hold {sealed_size} bytes of {'disk' if trees[0].upper else 'memory'}, "
            f"and Limits.disk is {disk}",
            reason=f"what is sealed stays, files that were deleted or overwritten since included; "
            f"each counts {BYTES_PER_FILE} bytes at least",
            hint="reset() to an earlier state, begin anew from the image, or give a higher Limits.disk",
        )


class Snapshot:
    """The sealed state of a workspace, to create sandboxes from and to reset a workspace to.

    Any number of sandboxes can share a snapshot without copying it. It takes the memory (before Linux 6.6 the disk
    space of the store) of the files that the workspace had written. All snapshots on top of each other count to
    ``Limits.disk`` and not to ``Limits.memory``. The space is freed once the snapshot is closed and the last sandbox
    created from it has ended, or when the owner process exits. Create it with :meth:`minisandbox.Sandbox.snapshot`.

    Attributes:
        id: its id.
        image: the image below it.
        created: time of its creation in seconds since the epoch.
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
        """Return the sealed trees, lowest first.

        Raises:
            InvalidValue: the snapshot is closed.
        """
        if self._trees is None:
            raise InvalidValue(f"snapshot {self.id} is closed", hint="close it when nothing more is made over it")
        return self._trees

    def close(self) -> None:
        """Release the snapshot; sandboxes created from it keep running. Calling it again does nothing."""
        launcher = self._trees[0].launcher if self._trees else None
        self._trees = None
        if self._lease is not None:
            self._lease.release()
        if launcher is not None:
            launcher.flush()
            sweep()

    def __enter__(self) -> Self:
        """Use the snapshot in a ``with`` block, which closes it at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the snapshot."""
        self.close()
