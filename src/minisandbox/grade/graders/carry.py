"""Copy files from an agent's sandbox to a clean one, through the host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from minisandbox.errors import FileAccessError
from minisandbox.sandbox import Sandbox
from minisandbox.types import FileType
from minisandbox.values import GiB

_MOST = 2 * GiB
_STEP_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Carried:
    """Copies of a sandbox's files on the host.

    Attributes:
        copies: each path with its copy on the host, or None if the sandbox has no such file.
    """

    copies: tuple[tuple[PurePosixPath, Path | None], ...]

    def put(self, box: Sandbox) -> None:
        """Replace another sandbox's files by the copies.

        Links that lead out of a copied directory are not copied: the other sandbox keeps its own.

        Raises:
            FileAccessError: a file cannot be written.
            SandboxGone: the sandbox has ended.
        """
        for path, copy in self.copies:
            if copy is None:
                _remove(box, path)
                continue
            if copy.is_dir():
                _remove_others(box, path, copy)
            box.files.upload(copy, path)
            if owner := box.image.user:
                box.exec(["chown", "-R", owner, str(path)], user=0, cwd="/", timeout=_STEP_TIMEOUT).check()


@contextlib.contextmanager
def carried_files(box: Sandbox, paths: Sequence[str], workdir: PurePosixPath) -> Iterator[Carried]:
    """Copy files of a sandbox to the host; the copies exist while the block runs.

    Args:
        box: the sandbox.
        paths: files and directories; ``/`` itself is ignored.
        workdir: the base of relative paths.

    Raises:
        FileAccessError: a path contains more than 2 GiB or cannot be read.
        SandboxGone: the sandbox has ended.
    """
    with tempfile.TemporaryDirectory(prefix="minisandbox-carry-") as folder:
        copies: list[tuple[PurePosixPath, Path | None]] = []
        for path in dict.fromkeys(workdir / path for path in paths):
            if len(path.parts) < 2:
                continue
            copy = Path(folder) / str(len(copies))
            if exists := box.files.exists(path):
                box.files.download(path, copy, limit=_MOST)
            copies.append((path, copy if exists else None))
        yield Carried(tuple(copies))


def _remove(box: Sandbox, path: PurePosixPath) -> None:
    with contextlib.suppress(FileAccessError):  # nothing to remove: a parent of the path is not a directory
        box.files.remove(path, recursive=True, missing_ok=True)


def _remove_others(box: Sandbox, path: PurePosixPath, copy: Path) -> None:
    """Remove a sandbox's files that the copy lacks, except links, which may not have been copied."""
    if not box.files.exists(path):
        return
    if box.files.stat(path).type is not FileType.DIRECTORY:
        _remove(box, path)
        return
    for entry in box.files.list(path):
        copied_entry = copy / entry.path.name
        if entry.type is FileType.DIRECTORY and copied_entry.is_dir() and not copied_entry.is_symlink():
            _remove_others(box, entry.path, copied_entry)
        elif entry.type is not FileType.SYMLINK and (entry.type is FileType.DIRECTORY or not copied_entry.exists()):
            _remove(box, entry.path)
