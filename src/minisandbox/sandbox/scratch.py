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
from minisandbox.launch.kernel import syscalls as sc
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
OTHER_TMPDIR = "set TMPDIR to another directory"


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
    hint = OTHER_TMPDIR if parent is None else ""
    parent = parent or _temporary_directory() or Path("/tmp")  # noqa: S108 - only for the error
    with _noted_parent(parent), runtime_os_errors("make a temporary directory", parent, hint):
        prefix = f"{_PREFIX}{registry.owner_name()}-"
        return Path(tempfile.mkdtemp(prefix=prefix, dir=None if hint else parent)).resolve()


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


def _temporary_directory() -> Path | None:
    """Return the temporary directory, or None if none is writable."""
    with contextlib.suppress(FileNotFoundError):
        return Path(tempfile.gettempdir()).resolve()
    return None


@contextmanager
def _noted_parent(parent: Path) -> Iterator[None]:
    """Record a parent directory in a note, and keep the note from being removed while the body creates a directory.

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
def _locked(directory: Path, operation: int) -> Iterator[None]:
    """Lock a directory; BlockingIOError if another process holds the lock."""
    with sc.closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        yield


def _read_notes() -> Iterator[tuple[Path, Path]]:
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
    parents = {parent for _, parent in _read_notes()} | {parent for parent in [_temporary_directory()] if parent}
    for path in (path for parent in sorted(parents) for path in _scratch_directories(parent)):
        owner = path.name.removeprefix(_PREFIX).rpartition("-")[0]
        with contextlib.suppress(OSError):  # the directory is gone
            if path.lstat().st_uid == os.geteuid() and registry.is_dead(owner):
                yield ScratchLeftover(_KIND, path, owner)


def _scratch_directories(parent: Path) -> list[Path]:
    """Return the scratch directories in a parent directory; [] if the parent cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(parent.glob(f"{_PREFIX}*"))
    return []


def reap() -> None:
    """Remove directories of dead owners, and notes of parents without any scratch directory."""
    for leftover in leftovers():
        leftover.remove()
    with contextlib.suppress(HostError, OSError), _locked(registry.runtime_directory() / _NOTES, fcntl.LOCK_EX):
        for note, parent in _read_notes():
            if not _scratch_directories(parent):
                note.unlink(missing_ok=True)
