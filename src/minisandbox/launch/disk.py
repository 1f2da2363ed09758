"""Measure an overlay upper on disk and enforce its size limit, because the kernel has no quota for one directory.

Pid 1 counts the upper's files while commands run. A worker counts them after a command that may have exceeded the
limit, and the zygote counts them for snapshots. The sandbox's processes may change the tree during a count, so this
module follows no symbolic link and relies on no file name.
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

BYTES_PER_FILE = 4096
"""Bytes of scratch per inode: a tmpfs of this many bytes more may hold one more file."""
PARTS = ("upper", "usr")
"""Directories of an upper that hold the sandbox's files; the other directories are overlayfs work directories."""
FLOOR, NEAR_FLOOR = 256 << 20, 512 << 20
"""Free bytes of a file system. Below ``NEAR_FLOOR`` no upper may grow; below ``FLOOR`` all commands are killed."""
_ENTRIES = 200
"""Files counted between two yields of :meth:`Count.steps`. Each subdirectory also yields, because it takes longer."""
_MOST_OPEN = 256
"""Maximum number of parent directories that a count keeps open."""
_SHARED = struct.Struct("=QQQQQ")
SHARED_SIZE = _SHARED.size


class Count:
    """Adds up the disk blocks of all files in an upper. A file with several hard links counts once.

    Args:
        upper: descriptor of a directory that holds :data:`PARTS`.
    """

    def __init__(self, upper: int) -> None:
        self._upper = upper
        self._blocks = self._files = 0
        self._seen: set[int] = set()

    @property
    def bytes(self) -> int:
        """Bytes counted so far. Each file counts at least :data:`BYTES_PER_FILE`, as in a tmpfs."""
        return max(self._blocks * 512, self._files * BYTES_PER_FILE)

    def steps(self) -> Iterator[None]:
        """Count the files, yielding often so that the caller can do other work."""
        for part in PARTS:
            try:
                root = os.open(part, DIRECTORY_FLAGS, dir_fd=self._upper)
            except OSError:  # "usr" exists only if the sandbox can write to the host's /usr
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


def tmpfs_usage() -> int:
    """Return the bytes that this sandbox uses in its tmpfs, which holds /run and /dev/shm."""
    info = os.statvfs("/dev/shm")  # noqa: S108 - a mount of our own
    return (info.f_blocks - info.f_bfree) * info.f_frsize


class FreeSpace(NamedTuple):
    """Free space of a file system.

    Attributes:
        bytes: free bytes.
        files: free inodes; 0 if the file system does not report them.
    """

    bytes: int
    files: int


def free_space_of(upper: int) -> FreeSpace:
    """Return the free space of an upper's file system; 0 bytes if it has no free inodes."""
    info = os.fstatvfs(upper)
    full = info.f_files > 0 and info.f_favail == 0
    return FreeSpace(0 if full else info.f_bavail * info.f_frsize, info.f_favail)


def _written() -> int:
    """Return the bytes that this process and its reaped children have written to disks (getrusage(2))."""
    usages = (resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(process_usage.ru_oublock for process_usage in usages) * 512


class DiskLimit:
    """The size limit of an upper on disk, shared by the sandbox's pid 1 and its workers.

    Args:
        upper: descriptor of the upper.
        limit: bytes that the upper may hold.
        shared: shared memory of pid 1 and the workers: :data:`SHARED_SIZE` bytes, initially zero.

    Attributes:
        upper: descriptor of the upper.
        limit: bytes that the upper may hold.
    """

    def __init__(self, upper: int, limit: int, shared: memoryview) -> None:
        self.upper = upper
        self.limit = limit
        self._shared = shared
        if not self.allowed_size:  # the shared memory is still zero: this process is the first to use it
            self._state = _State(0, limit, 0, *free_space_of(upper))
        self._kill_count = self._credit = 0
        self._written = _written()

    @property
    def allowed_size(self) -> int:
        """Size in bytes above which commands are killed.

        It is the limit, or the size at the last count if that is larger, so that commands can still delete files.
        """
        return self._state.allowed_size

    @property
    def counted_size(self) -> int:
        """Size of the upper in bytes at the last count."""
        return self._state.counted_size

    def is_near(self, size: int = 0) -> bool:
        """Return whether the upper is probably near its limit, without counting its files.

        The estimate is the size at the last count, plus the bytes written since. The bytes written are the larger of
        two numbers: the drop in free space, and the writes of this process and its reaped children. The drop alone
        would be too small if other processes have freed space on the same file system.

        Args:
            size: bytes that are about to be written.
        """
        state, now = self._state, free_space_of(self.upper)
        files = (state.free_files - now.files) * BYTES_PER_FILE
        written_size = max(state.free_bytes - now.bytes, files, _written() - self._written)
        return state.counted_size + max(0, written_size) + size > self.limit - self.limit // 8

    def note_count(self, size: int, free_space: FreeSpace) -> None:
        """Record the result of a count. A size above the limit is tolerated, but the upper may not grow further.

        Args:
            size: bytes counted.
            free_space: free space of the file system when the count began.
        """
        self._state = _State(self._state.kill_count, max(self.limit, size), size, *free_space)

    def note_kill(self) -> None:
        """Record that commands are about to be killed. Only pid 1 calls this."""
        self._state = self._state._replace(kill_count=self._state.kill_count + 1)

    def mark(self) -> None:
        """Remember the counters before a job, so that :meth:`was_hit` can compare with them."""
        self._kill_count, self._credit, self._written = self._state.kill_count, 0, _written()

    def was_hit(self) -> bool:
        """Return whether commands were killed since :meth:`mark`, or the upper has reached its limit.

        Files are counted only if the limit is near.
        """
        if self._state.kill_count > self._kill_count:
            return True
        return self.is_near() and (self._measure() >= self.limit or free_space_of(self.upper).bytes == 0)

    def charge(self, size: int) -> None:
        """Reserve bytes for a file operation before it writes them. Files are counted only if the limit is near.

        Raises:
            OSError: the limit would be exceeded (ENOSPC).
        """
        if size > self._credit and self.is_near(size):
            self._credit = max(0, self.limit - self._measure())
            if size > self._credit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._credit = max(0, self._credit - size)

    def _measure(self) -> int:
        free_space = free_space_of(self.upper)
        size = measure(self.upper) + tmpfs_usage()
        self.note_count(size, free_space)
        self._written = _written()
        return size

    @property
    def _state(self) -> _State:
        return _State(*_SHARED.unpack_from(self._shared))

    @_state.setter
    def _state(self, state: _State) -> None:
        _SHARED.pack_into(self._shared, 0, *state)


class _State(NamedTuple):
    """The counters in shared memory.

    Attributes:
        kill_count: how often commands were killed.
        allowed_size: see :attr:`DiskLimit.allowed_size`.
        counted_size: size of the upper in bytes at the last count.
        free_bytes: free bytes of the file system when that count began.
        free_files: free inodes of the file system when that count began.
    """

    kill_count: int
    allowed_size: int
    counted_size: int
    free_bytes: int
    free_files: int
