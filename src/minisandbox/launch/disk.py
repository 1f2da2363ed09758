"""Count what a sandbox has written to a directory on disk: the kernel has no quota of one directory.

Pid 1 counts while commands run, a worker after a command that may have written too much, the zygote for snapshots. The
sandbox's processes may change the tree meanwhile, so nothing here follows a link or trusts a name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

from .jobs.trees import DIRECTORY_FLAGS, DirWalker, walk_statuses
from .plan import BYTES_PER_FILE

PARTS = ("upper", "usr")
"""Directories of an upper that hold what was written; overlayfs works in the others."""
FLOOR, NEAR_FLOOR = 256 << 20, 512 << 20
"""Free bytes of a file system: below the second no upper may grow, below the first all commands are killed."""
_ENTRIES = 200
"""Entries between two pauses; each subdirectory is followed by one too, because entering it takes longer."""
_MOST_OPEN = 256
"""Directories above the current one of which the descriptors stay open."""
_SHARED = struct.Struct("=QQQQQ")
SHARED_SIZE = _SHARED.size


class Count:
    """Adds up the blocks of all files below an upper; a file with several names counts once.

    Args:
        upper: descriptor of a directory that holds :data:`PARTS`.
    """

    def __init__(self, upper: int) -> None:
        self._upper = upper
        self._blocks = self._files = 0
        self._seen: set[int] = set()

    @property
    def bytes(self) -> int:
        """Bytes found so far; each file counts :data:`.plan.BYTES_PER_FILE` at least, as in a tmpfs."""
        return max(self._blocks * 512, self._files * BYTES_PER_FILE)

    def steps(self) -> Iterator[None]:
        """Count; yields often, so that the caller can do other work."""
        for part in PARTS:
            try:
                root = os.open(part, DIRECTORY_FLAGS, dir_fd=self._upper)
            except OSError:  # made only if the host's /usr is writable inside
                continue
            with contextlib.closing(DirWalker(root, _MOST_OPEN)) as walker:
                for number, status in enumerate(walk_statuses(walker), 1):
                    self._add(status)
                    if number % _ENTRIES == 0 or stat.S_ISDIR(status.st_mode):
                        yield

    def _add(self, status: os.stat_result) -> None:
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if status.st_ino in self._seen:
                return
            self._seen.add(status.st_ino)
        self._blocks += status.st_blocks
        self._files += 1


def measure(upper: int) -> int:
    """Return the bytes that an upper on disk holds.

    Args:
        upper: descriptor of the directory.
    """
    count = Count(upper)
    for _ in count.steps():
        pass
    return count.bytes


def kept_in_memory() -> int:
    """Return the bytes that this sandbox holds in its tmpfs, for /run and /dev/shm."""
    info = os.statvfs("/dev/shm")  # noqa: S108 - a mount of our own
    return (info.f_blocks - info.f_bfree) * info.f_frsize


class Room(NamedTuple):
    """Free space of a file system.

    Attributes:
        bytes: free bytes.
        files: free files; 0 if it does not say.
    """

    bytes: int
    files: int


def room(upper: int) -> Room:
    """Return the free space of an upper's file system; 0 bytes if it cannot hold further files."""
    info = os.fstatvfs(upper)
    full = info.f_files > 0 and info.f_favail == 0
    return Room(0 if full else info.f_bavail * info.f_frsize, info.f_favail)


def _written() -> int:
    """Return the bytes that this process has written to disks, and those that it waited for (getrusage(2))."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_oublock for one in used) * 512


class DiskLimit:
    """The limit of a sandbox's upper on disk, shared by its pid 1 and its workers.

    Args:
        upper: descriptor of the directory.
        limit: bytes.
        shared: memory that these processes share, :data:`SHARED_SIZE` bytes of zeros.

    Attributes:
        upper: the same.
        limit: the same.
    """

    def __init__(self, upper: int, limit: int, shared: memoryview) -> None:
        self.upper = upper
        self.limit = limit
        self._shared = shared
        if not self.allowed:  # the first of these processes
            self._state = _State(0, limit, 0, *room(upper))
        self._ended = self._credit = 0
        self._written = _written()

    @property
    def allowed(self) -> int:
        """Bytes beyond which commands are killed: the limit, or the present size if larger, to allow removals."""
        return self._state.allowed

    @property
    def counted(self) -> int:
        """Bytes that the last count found."""
        return self._state.counted

    def is_near(self, size: int = 0) -> bool:
        """Return whether the upper may hold nearly as much as the limit.

        That is what the last count found, and what has been written since: by what the file system has lost, and by
        what this process and those that it waited for have written (others may have freed as much meanwhile).

        Args:
            size: bytes that are about to be written.
        """
        state, now = self._state, room(self.upper)
        files = (state.free_files - now.files) * BYTES_PER_FILE
        written = max(state.free_bytes - now.bytes, files, _written() - self._written)
        return state.counted + max(0, written) + size > self.limit - self.limit // 8

    def note_count(self, size: int, free: Room) -> None:
        """Record a count; a size above the limit stays allowed, growth does not.

        Args:
            size: its bytes.
            free: what the file system had left at its beginning.
        """
        self._state = _State(self._state.ended, max(self.limit, size), size, *free)

    def note_ended(self) -> None:
        """Count that commands are about to be ended; only pid 1 calls this."""
        self._state = self._state._replace(ended=self._state.ended + 1)

    def mark(self) -> None:
        """Remember the state before a job."""
        self._ended, self._credit, self._written = self._state.ended, 0, _written()

    def was_hit(self) -> bool:
        """Return whether commands were killed since the mark, or the limit is reached; counts only if likely."""
        if self._state.ended > self._ended:
            return True
        return self.is_near() and (self._find() >= self.limit or room(self.upper).bytes == 0)

    def charge(self, size: int) -> None:
        """Refuse to write so many bytes for a file operation if they are too many; counts only if that is likely.

        Raises:
            OSError: the limit would be exceeded (ENOSPC).
        """
        if size > self._credit and self.is_near(size):
            self._credit = max(0, self.limit - self._find())
            if size > self._credit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._credit = max(0, self._credit - size)

    def _find(self) -> int:
        free = room(self.upper)
        size = measure(self.upper) + kept_in_memory()
        self.note_count(size, free)
        self._written = _written()
        return size

    @property
    def _state(self) -> _State:
        return _State(*_SHARED.unpack_from(self._shared))

    @_state.setter
    def _state(self, state: _State) -> None:
        _SHARED.pack_into(self._shared, 0, *state)


class _State(NamedTuple):
    """The counts that all processes share.

    Attributes:
        ended: how often commands were ended.
        allowed: see :attr:`DiskLimit.allowed`.
        counted: bytes that the last count found.
        free_bytes: what the file system had left then.
        free_files: likewise.
    """

    ended: int
    allowed: int
    counted: int
    free_bytes: int
    free_files: int
