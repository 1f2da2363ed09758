"""Temporary host directories of sandboxes; those of dead owners are removed.

Their names say whose they are, so that the next owner removes what a killed owner could not. Where they are made
is noted with the records of owners: the next owner may have another TMPDIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import HostError
from minisandbox.host import reaper, registry
from minisandbox.host.os_errors import runtime_os_errors
from minisandbox.sandbox.launcher import mappers
from minisandbox.store.disk.trees import remove_tree

_PREFIX = "minisandbox-scratch-"
_KIND = "directory"
_NOTES = "temporary"
_REMOVER = (
    "import os, pathlib, sys; package, path, *mappers = os.fsdecode(sys.stdin.buffer.read()).split('\\0'); "
    "sys.path.append(package); from minisandbox.launch.kernel.identity import enter_outer_namespace; "
    "from minisandbox.store.disk.trees import remove_tree; "
    "enter_outer_namespace(mappers); remove_tree(pathlib.Path(path))"
)
ELSEWHERE = "set TMPDIR to another directory"


@dataclass(frozen=True, slots=True)
class ScratchLeftover(reaper.Leftover):
    """A directory whose owner is dead."""

    def remove(self) -> bool:
        """Remove a directory with all in it; the next cleanup removes what could not be removed."""
        remove(self.path)
        return not os.path.lexists(self.path)


def new_scratch(parent: Path | None = None) -> Path:
    """Make an empty directory of this process, which its user alone may enter.

    Args:
        parent: where; that for temporary files by default.

    Returns:
        Its path; the caller removes it.

    Raises:
        HostError: the directory cannot be created.
    """
    elsewhere = ELSEWHERE if parent is None else ""
    parent = parent or _place() or Path("/tmp")  # noqa: S108 - only told
    with _noting(parent), runtime_os_errors("make a temporary directory", parent, elsewhere):
        prefix = f"{_PREFIX}{registry.owner_name()}-"
        return Path(tempfile.mkdtemp(prefix=prefix, dir=None if elsewhere else parent)).resolve()


def remove(path: Path) -> None:
    """Remove a directory with all in it; the next cleanup removes what could not be removed."""
    try:
        remove_tree(path)
    except PermissionError:  # files of subordinate ids, which belong to this user in a user namespace alone
        if os.geteuid() != 0 and all(mappers()):
            settings = "\0".join((str(Path(__file__).parents[2]), str(path), *mappers()))
            command = [sys.executable, "-I", "-c", _REMOVER]
            subprocess.run(command, input=os.fsencode(settings), capture_output=True, check=False, cwd="/")
    except OSError:  # another user's, or removed by another process
        pass


def _place() -> Path | None:
    """Return the temporary directory, or None if none is writable."""
    with contextlib.suppress(FileNotFoundError):
        return Path(tempfile.gettempdir()).resolve()
    return None


@contextmanager
def _noting(parent: Path) -> Iterator[None]:
    """Note a place, and keep the note there while a directory is made in it.

    Without a runtime directory, only owners with the same TMPDIR will look there.
    """
    name = os.fsencode(parent)
    with contextlib.ExitStack() as locks:
        with contextlib.suppress(HostError, OSError):
            notes = registry.runtime_directory() / _NOTES
            notes.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(BlockingIOError):
                locks.enter_context(_locked(notes, fcntl.LOCK_SH))
            (notes / hashlib.sha256(name).hexdigest()).write_bytes(name)
        yield


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Lock a directory; BlockingIOError if another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _noted() -> Iterator[tuple[Path, Path]]:
    """Yield the notes, with the directories that they name."""
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
    """Yield this user's directories whose owners were killed."""
    places = {place for _, place in _noted()} | {place for place in [_place()] if place}
    for path in (path for place in sorted(places) for path in _made_in(place)):
        owner = path.name.removeprefix(_PREFIX).rpartition("-")[0]
        with contextlib.suppress(OSError):  # the directory is gone
            if path.lstat().st_uid == os.geteuid() and registry.is_dead(owner):
                yield ScratchLeftover(_KIND, path, owner)


def _made_in(parent: Path) -> list[Path]:
    """Return our directories in a directory; nothing if it cannot be read any more."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(parent.glob(f"{_PREFIX}*"))
    return []


def reap() -> None:
    """Remove them, and the notes of places that have nothing of ours."""
    for leftover in leftovers():
        leftover.remove()
    with contextlib.suppress(HostError, OSError), _locked(registry.runtime_directory() / _NOTES, fcntl.LOCK_EX):
        for note, parent in _noted():
            if not _made_in(parent):
                note.unlink(missing_ok=True)
