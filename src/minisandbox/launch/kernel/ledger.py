"""What the limits of a sandbox have refused so far: the kernel's counters, and what pid 1 has noted.

A worker marks where they stand when a command starts, and tells at its end which limits it ran into.
"""

from __future__ import annotations

import mmap
import os
import struct

from . import cgroups

MEMORY, PROCESSES, DISK, FILE_SIZE = "memory", "processes", "disk", "file_size"
_NOTED = struct.Struct("=I")


class Ledger:
    """One sandbox's counters, shared by its pid 1 and its workers.

    Args:
        hold: open files of the control group, or None where there is none.
        disk: a directory on the file system that takes the sandbox's writes.

    Attributes:
        hold: the same.
    """

    def __init__(self, hold: cgroups.Hold | None, disk: str = "/dev/shm") -> None:  # noqa: S108 - the sandbox's own
        self.hold = hold
        self._disk = disk
        self._noted = mmap.mmap(-1, _NOTED.size)  # shared with every process that is forked from here (mmap(2))
        self._mark = [0, 0]

    def note_memory(self) -> None:
        """Count that processes were ended for want of memory; only pid 1 does."""
        _NOTED.pack_into(self._noted, 0, _NOTED.unpack_from(self._noted)[0] + 1)

    def mark(self) -> None:
        """Remember where the counters stand."""
        self._mark = self._counts()

    def hits(self) -> list[str]:
        """The limits that refused something since the last mark; a disk that is full now counts."""
        now = self._counts()
        found = [
            name for name, before, after in zip((MEMORY, PROCESSES), self._mark, now, strict=True) if after > before
        ]
        return [*found, DISK] if self._is_full() else found

    def _counts(self) -> list[int]:
        counted = cgroups.read_counters(self.hold.counters) if self.hold else [0, 0]
        return [counted[0] + _NOTED.unpack_from(self._noted)[0], counted[1]]

    def _is_full(self) -> bool:
        try:
            status = os.statvfs(self._disk)
        except OSError:
            return False
        return status.f_blocks > 0 and (status.f_bavail == 0 or status.f_favail == 0)
