"""Directories on the host for the time of a sandbox, which outlive no owner for long.

Their names say whose they are, so that whoever starts next removes what a killed owner could not.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisandbox.host import reaper
from minisandbox.host.faults import runtime_faults
from minisandbox.store.trees import remove_tree

_PREFIX = "minisandbox-scratch-"
_KIND = "directory"
ELSEWHERE = "set TMPDIR to another directory"


@dataclass(frozen=True, slots=True)
class ScratchLeftover(reaper.Leftover):
    """A directory whose owner is dead."""

    def remove(self) -> bool:
        """Remove it; returns whether it is gone."""
        with contextlib.suppress(OSError):  # somebody else's, or removed by somebody else
            remove_tree(self.path)
        return not os.path.lexists(self.path)


def new_scratch() -> Path:
    """Make an empty directory of this process, which its user alone may enter.

    Returns:
        Its path; to be removed by whoever asked for it.

    Raises:
        HostError: it cannot be made.
    """
    with runtime_faults("make a temporary directory", _place() or Path("/tmp"), ELSEWHERE):  # noqa: S108 - only told
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{reaper.owner_name()}-")).resolve()


def _place() -> Path | None:
    """Where they are made; None where no directory for temporary files can be written."""
    with contextlib.suppress(FileNotFoundError):
        return Path(tempfile.gettempdir())
    return None


@contextmanager
def scratch() -> Iterator[Path]:
    """Give an empty directory of this process, which is removed at the end."""
    path = new_scratch()
    try:
        yield path
    finally:
        remove_tree(path)


def leftovers() -> Iterator[ScratchLeftover]:
    """This user's directories whose owners were killed."""
    place = _place()
    for path in place.glob(f"{_PREFIX}*") if place else ():
        owner = path.name.removeprefix(_PREFIX).rpartition("-")[0]
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid() and reaper.is_dead(owner):
                yield ScratchLeftover(_KIND, path, owner)


def reap() -> None:
    """Remove them."""
    for leftover in leftovers():
        leftover.remove()
