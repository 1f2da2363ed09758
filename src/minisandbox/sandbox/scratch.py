"""Directories on the host for the time of a sandbox, which outlive no owner for long.

Their names say whose they are, so that the next owner removes what a killed owner could not. Where they are made
is noted with the records of owners: the next owner may have another TMPDIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import HostError
from minisandbox.host import reaper, registry
from minisandbox.host.os_errors import runtime_os_errors
from minisandbox.store.trees import remove_tree

_PREFIX = "minisandbox-scratch-"
_KIND = "directory"
_NOTES = "temporary"
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
        Its path; the caller removes it.

    Raises:
        HostError: it cannot be made.
    """
    place = _place() or Path("/tmp")  # noqa: S108 - only told
    with _noting(place), runtime_os_errors("make a temporary directory", place, ELSEWHERE):
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{registry.owner_name()}-")).resolve()


def _place() -> Path | None:
    """Where they are made; None where no directory for temporary files can be written."""
    with contextlib.suppress(FileNotFoundError):
        return Path(tempfile.gettempdir()).resolve()
    return None


@contextmanager
def _noting(place: Path) -> Iterator[None]:
    """Note a place, and keep the note there while a directory is made in it.

    Without a runtime directory, only owners with the same TMPDIR will look there.
    """
    name = os.fsencode(place)
    with contextlib.ExitStack() as kept:
        with contextlib.suppress(HostError, OSError):
            notes = registry.runtime_directory() / _NOTES
            notes.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(BlockingIOError):
                kept.enter_context(_locked(notes, fcntl.LOCK_SH))
            (notes / hashlib.sha256(name).hexdigest()).write_bytes(name)
        yield


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Lock a directory; BlockingIOError where somebody else has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _noted() -> Iterator[tuple[Path, Path]]:
    """The notes, with the places they tell."""
    with contextlib.suppress(HostError, OSError):
        for note in sorted((registry.runtime_directory() / _NOTES).iterdir()):
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
            if path.lstat().st_uid == os.geteuid() and registry.is_dead(owner):
                yield ScratchLeftover(_KIND, path, owner)


def _made_in(place: Path) -> list[Path]:
    """What there is of ours; nothing where one cannot look any more."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(place.glob(f"{_PREFIX}*"))
    return []


def reap() -> None:
    """Remove them, and the notes of places that have nothing of ours."""
    for leftover in leftovers():
        leftover.remove()
    with contextlib.suppress(HostError, OSError), _locked(registry.runtime_directory() / _NOTES, fcntl.LOCK_EX):
        for note, place in _noted():
            if not _made_in(place):
                note.unlink(missing_ok=True)
