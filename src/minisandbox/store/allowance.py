"""What reading a tree may cost: its maker need not have paid for it.

A hole takes nothing of the disk and no time to make, and as long to hash as bytes do: of zeros, which builds may
out of a hash. So holes are counted before they are read; whatever else is cheap to make and dear to read (copies that
share blocks, a million names) meets the end of the time.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from minisandbox.errors import UnfitTree
from minisandbox.launch.jobs.trees import seek

_GIB = 1 << 30
MOST_HOLES = 8 * _GIB
"""Bytes of holes that the files of a layer may have together: some 20 s of hashing."""
_MOST_NAMED = 3
_LONGEST_NAME = 200


@dataclass(slots=True)
class Allowance:
    """What reading one tree may cost.

    Attributes:
        seconds: how long it may take from now on; None: as long as it takes.
        holes: bytes of holes that there may be.
    """

    seconds: float | None = None
    holes: int = MOST_HOLES
    _begun: float = field(default_factory=time.monotonic)
    _found: int = 0
    _sparse: list[tuple[int, str]] = field(default_factory=list)

    def check(self) -> None:
        """See whether there is time left.

        Raises:
            UnfitTree: nothing of it is left.
        """
        if self.seconds is not None and time.monotonic() - self._begun > self.seconds:
            raise UnfitTree(
                "the tree takes too long to read",
                reason=f"after {self.seconds:.0f} s it was not listed and hashed",
                hint="leave less, or give the step more time (PythonRecipe.step_timeout)",
            )

    def admit(self, name: str, descriptor: int, size: int) -> None:
        """Count a file's holes, before it is read from its beginning.

        Args:
            name: what errors call it.
            descriptor: the file.
            size: its bytes.

        Raises:
            UnfitTree: those of all files are too many.
            OSError: the kernel refused.
        """
        own = 0
        for hole in _holes(descriptor, size):
            self.check()
            own += hole
        if own:
            self._found += own
            heapq.heappush(self._sparse, (own, name))
            if len(self._sparse) > _MOST_NAMED:
                heapq.heappop(self._sparse)
        if self._found > self.holes:
            named = ", ".join(f"{shortened(name)} ({own / _GIB:.1f} GiB)" for own, name in sorted(self._sparse)[::-1])
            raise UnfitTree(
                "the tree has too many holes to be read",
                reason=f"sparse files may have {self.holes / _GIB:.0f} GiB of holes together; most are in {named}",
                hint="remove these files in the command that makes them, or make them where they are needed",
            )
        os.lseek(descriptor, 0, os.SEEK_SET)


def shortened(name: str) -> str:
    """A path as errors show it, of whatever length it is."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}...{name[-_LONGEST_NAME // 2 :]}"


def _holes(descriptor: int, size: int) -> Iterator[int]:
    """The sizes of a file's holes, and of what was only set aside for it (fallocate(2)), as lseek(2) tells them."""
    position = 0
    while position < size:
        start = min(seek(descriptor, position, os.SEEK_DATA, size), size)
        yield start - position
        position = min(seek(descriptor, start, os.SEEK_HOLE, size), size) if start < size else size
