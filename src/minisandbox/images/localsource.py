"""Local sources: the files of a directory of this machine, listed and hashed, packed without following a link."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from minisandbox.errors import ProgramNotFound, SourceError
from minisandbox.images.hostgit import run_git
from minisandbox.images.recipe import LocalSource

_LIST_TIMEOUT = 120.0
_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a local source at one moment.

    Attributes:
        root: the directory.
        files: (path, kind, sha256 of the content) of each; kind is ``file``, ``program`` or ``link``.
    """

    root: Path
    files: tuple[tuple[str, str, str], ...]

    @property
    def digest(self) -> str:
        """The hash of everything."""
        total = hashlib.sha256()
        for path, kind, content in self.files:
            total.update(os.fsencode(path) + b"\0" + kind.encode() + content.encode())
        return total.hexdigest()

    def write_archive(self, target: Path) -> None:
        """Write the files as a tar archive.

        Raises:
            SourceError: a file changed since the snapshot.
            OSError: it cannot be written.
        """
        with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
            for path, kind, content in self.files:
                found = _read(self.root, path)
                if found is None or (found[0], hashlib.sha256(found[1]).hexdigest()) != (kind, content):
                    raise SourceError(f"{self.root / path} changed while it was read", hint="build again")
                archive.addfile(*_member(path, kind, found[1]))


def take_snapshot(source: LocalSource) -> Snapshot:
    """List and hash the files of a local source.

    Raises:
        SourceError: it is no directory, has no files, or one cannot be read.
        ProgramNotFound: it lies in a git work tree, and there is no git.
    """
    root = source.path.expanduser().absolute()
    if not root.is_dir():
        raise SourceError(f"{root} is not a directory", hint="give the path of a repository's work tree")
    try:
        paths = sorted(set(_tracked(root) or _walked(root)))
        files = tuple(described for path in paths if (described := _described(root, path)))
    except OSError as error:
        raise SourceError(f"cannot read {root}", reason=str(error)) from error
    if not files:
        raise SourceError(f"{root} has no files")
    return Snapshot(root, files)


def _described(root: Path, path: str) -> tuple[str, str, str] | None:
    found = _read(root, path)
    return None if found is None else (path, found[0], hashlib.sha256(found[1]).hexdigest())


def _tracked(root: Path) -> list[str] | None:
    """What git would add here; None where this is no git work tree."""
    command = ["-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
    # taking all files of a work tree where git fails would silently take the ignored ones too
    is_work_tree = any((place / ".git").exists() for place in (root, *root.parents))
    try:
        done = run_git(command, timeout=_LIST_TIMEOUT)
    except ProgramNotFound:
        if is_work_tree:
            raise
        return None
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"git took longer than {_LIST_TIMEOUT:.0f} s to list {root}") from error
    if done.returncode != 0:
        if is_work_tree:
            raise SourceError(f"git cannot list {root}", reason=done.stderr.decode("utf-8", "replace").strip()[-500:])
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walked(root: Path) -> Iterator[str]:
    for directory, names, files in os.walk(root):
        here = Path(directory)
        links = [name for name in names if (here / name).is_symlink()]
        names[:] = sorted(name for name in names if name != ".git" and name not in links)
        for name in [*files, *links]:
            if name != ".git":
                yield str((here / name).relative_to(root))


def _read(root: Path, path: str) -> tuple[str, bytes] | None:
    """A file's kind and content, or a link's target; None for what is neither (a socket, a submodule, gone)."""
    if not _is_below(root, path):
        return None
    try:
        info = os.lstat(root / path)
        if stat.S_ISLNK(info.st_mode):
            return "link", os.fsencode(os.readlink(root / path))
        if not stat.S_ISREG(info.st_mode):
            return None
        fd = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):  # tracked, but gone: a directory may have become a file
        return None
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if info.st_size > _LARGEST:
            raise SourceError(f"{root / path} is too large for a source", reason=f"it has {info.st_size} bytes")
        content = file.read(info.st_size) if stat.S_ISREG(info.st_mode) else b""  # something may have taken its place
        return ("program" if info.st_mode & stat.S_IXUSR else "file"), content


def _is_below(root: Path, path: str) -> bool:
    """Whether a path leads through no link and nowhere else: git lists what an index says, which may be made by hand.

    A tracked file whose directory has become a link is none of the work tree's for git either.
    """
    place = PurePosixPath(path)
    if place.is_absolute() or ".." in place.parts:
        return False
    return not any((root / above).is_symlink() for above in place.parents if above.parts)


def _member(path: str, kind: str, content: bytes) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    info = tarfile.TarInfo(path)
    info.mode = 0o755 if kind == "program" else 0o644
    if kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
        return info, None
    info.size = len(content)
    return info, io.BytesIO(content)
