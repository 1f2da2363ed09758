"""Create temporary host directories for sandboxes, and remove those of dead owners.

Each directory is named after its owner, so that the next owner can remove the directories of a killed one. Their parent
directories are noted next to the records of owners, because the next owner may have another TMPDIR.
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
        """Remove the directory with its content; return False if part of it is left for the next cleanup."""
        remove(self.path)
        return not os.path.lexists(self.path)


def new_scratch(parent: Path | None = None) -> Path:
    """Create an empty directory for this process that only its user may enter.

    Args:
        parent: parent directory; the directory for temporary files if None.

    Returns:
        Path of the directory; the caller removes it.

    Raises:
        HostError: the directory cannot be created.
    """
    elsewhere = ELSEWHERE if parent is None else ""
    parent = parent or _place() or Path("/tmp")  # noqa: S108 - only for the error
    with _noting(parent), runtime_os_errors("make a temporary directory", parent, elsewhere):
        prefix = f"{_PREFIX}{registry.owner_name()}-"
        return Path(tempfile.mkdtemp(prefix=prefix, dir=None if elsewhere else parent)).resolve()


def remove(path: Path) -> None:
    """Remove a directory with its content; leave what cannot be removed to the next cleanup."""
    try:
        remove_tree(path)
    except PermissionError:  # files of subordinate ids, which only a user namespace can remove
        if os.geteuid() != 0 and all(mappers()):
            settings = "\0".join((str(Path(__file__).parents[2]), str(path), *mappers()))
            command = [sys.executable, "-I", "-c", _REMOVER]
            subprocess.run(command, input=os.fsencode(settings), capture_output=True, check=False, cwd="/")
    except OSError:  # it belongs to another user, or another process has removed it
        pass


def _place() -> Path | None:
    """Return the temporary directory, or None if none is writable."""
    with contextlib.suppress(FileNotFoundError):
        return Path(tempfile.gettempdir()).resolve()
    return None


@contextmanager
def _noting(parent: Path) -> Iterator[None]:
    """Record a parent directory, and protect the note from removal while the body creates a directory.

    Without a runtime directory, only owners with the same TMPDIR find directories there.
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
    """Yield the note files and the parent directories that they name."""
    with contextlib.suppress(HostError, OSError):
        for note in sorted((registry.runtime_directory() / _NOTES).iterdir()):
            with contextlib.suppress(OSError):
                yield note, Path("/", os.fsdecode(note.read_bytes()))


@contextmanager
def scratch() -> Iterator[Path]:
    """Create an empty directory for this process, and remove it after the body."""
    path = new_scratch()
    try:
        yield path
    finally:
        remove_tree(path)


def leftovers() -> Iterator[ScratchLeftover]:
    """Yield this user's directories of dead owners."""
    places = {place for _, place in _noted()} | {place for place in [_place()] if place}
    for path in (path for place in sorted(places) for path in _made_in(place)):
        owner = path.name.removeprefix(_PREFIX).rpartition("-")[0]
        with contextlib.suppress(OSError):  # the directory is gone
            if path.lstat().st_uid == os.geteuid() and registry.is_dead(owner):
                yield ScratchLeftover(_KIND, path, owner)


def _made_in(parent: Path) -> list[Path]:
    """Return the scratch directories in a parent directory; [] if the parent cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(parent.glob(f"{_PREFIX}*"))
    return []


def reap() -> None:
    """Remove directories of dead owners, and notes of parents without any scratch directory."""
    for leftover in leftovers():
        leftover.remove()
    with contextlib.suppress(HostError, OSError), _locked(registry.runtime_directory() / _NOTES, fcntl.LOCK_EX):
        for note, parent in _noted():
            if not _made_in(parent):
                note.unlink(missing_ok=True)
