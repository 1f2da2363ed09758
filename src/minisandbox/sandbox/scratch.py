"""Directories on the host for the time of a sandbox, which outlive no owner for long.

Their names say whose they are, so that whoever starts next removes what a killed owner could not. Where they are made
is noted beside the records of owners: whoever starts next may have another TMPDIR.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import HostError
from minisandbox.host import reaper
from minisandbox.host.faults import runtime_faults
from minisandbox.store.trees import remove_tree

_PREFIX = "minisandbox-scratch-"
_KIND = "directory"
_NOTES = "temporary"
_LONG_AGO = 3600.0
"""Seconds after which a note of a place that has nothing of ours is thrown away."""
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
    place = _place()
    if place is not None:
        _note(place)
    with runtime_faults("make a temporary directory", place or Path("/tmp"), ELSEWHERE):  # noqa: S108 - only told
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{reaper.owner_name()}-")).resolve()


def _place() -> Path | None:
    """Where they are made; None where no directory for temporary files can be written."""
    with contextlib.suppress(FileNotFoundError):
        return Path(tempfile.gettempdir()).resolve()
    return None


def _note(place: Path) -> None:
    """Note a place, and when it was used; without a runtime directory whoever starts there alone will look there."""
    name = os.fsencode(place)
    with contextlib.suppress(HostError, OSError):
        notes = reaper.runtime_directory() / _NOTES
        notes.mkdir(mode=0o700, exist_ok=True)
        (notes / hashlib.sha256(name).hexdigest()).write_bytes(name)


def _noted() -> Iterator[tuple[Path, Path]]:
    """The notes, with the places they tell."""
    with contextlib.suppress(HostError, OSError):
        for note in sorted((reaper.runtime_directory() / _NOTES).iterdir()):
            with contextlib.suppress(OSError):
                yield note, Path("/", os.fsdecode(note.read_bytes()))


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
    places = {place for _, place in _noted()} | {place for place in [_place()] if place}
    for path in (path for place in sorted(places) for path in _made_in(place)):
        owner = path.name.removeprefix(_PREFIX).rpartition("-")[0]
        with contextlib.suppress(OSError):  # it is gone
            if path.lstat().st_uid == os.geteuid() and reaper.is_dead(owner):
                yield ScratchLeftover(_KIND, path, owner)


def _made_in(place: Path) -> list[Path]:
    """What there is of ours; nothing where one cannot look any more."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(place.glob(f"{_PREFIX}*"))
    return []


def reap() -> None:
    """Remove them, and notes of places that have had nothing of ours for long."""
    for leftover in leftovers():
        leftover.remove()
    for note, place in _noted():
        with contextlib.suppress(OSError):
            if not _made_in(place) and time.time() > note.stat().st_mtime + _LONG_AGO:
                note.unlink()
