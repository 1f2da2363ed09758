"""List, hash and pack the files of a local directory without following a link.

Other processes may modify the directory meanwhile, so checking a path before opening it would be a race. Therefore,
each file is first opened relative to a descriptor of the directory, without following links, and then checked.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import ProgramNotFound, SourceError
from minisandbox.git import run_git
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.spec import LocalSource

_LIST_TIMEOUT = 120.0
_LARGEST = 1 << 31
"""The maximum size of a file in bytes, because files are read into memory."""
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
"""Error numbers of a path that is missing, is below a link or file, or leaves the source (forged git index)."""


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """The files of a local source, listed and hashed at one time.

    Attributes:
        root: the directory.
        files: (path, kind, sha256 of the content) of each file; kind is ``file``, ``program`` or ``link``.
    """

    root: Path
    files: tuple[tuple[str, str, str], ...]

    @property
    def digest(self) -> str:
        """The hash of all paths, kinds and contents."""
        total = hashlib.sha256()
        for path, kind, content in self.files:
            total.update(os.fsencode(path) + b"\0" + kind.encode() + content.encode())
        return total.hexdigest()

    def write_archive(self, target: Path) -> None:
        """Write the files as a tar archive.

        Raises:
            SourceError: a file changed since the snapshot.
            OSError: the archive cannot be written.
        """
        with _opened(self.root) as root_fd, tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
            for path, kind, content in self.files:
                entry = _read(root_fd, path)
                if entry is None or (entry[0], hashlib.sha256(entry[1]).hexdigest()) != (kind, content):
                    raise SourceError(f"{self.root / path} changed while it was read", hint="build again")
                archive.addfile(*_member(path, kind, entry[1]))


def take_snapshot(source: LocalSource) -> SourceSnapshot:
    """List and hash the files of a local source.

    Raises:
        SourceError: the path is not a directory, has no files, or a file cannot be read.
        ProgramNotFound: the source lies in a git work tree, and there is no git.
    """
    root = source.path.expanduser().absolute()
    try:
        with _opened(root) as root_fd:
            _check_place(root_fd, source)
            paths = sorted(set(_tracked(root) or _walked(root)))
            entries = ((path, _read(root_fd, path)) for path in paths)
            files = tuple(
                (path, entry[0], hashlib.sha256(entry[1]).hexdigest()) for path, entry in entries if entry is not None
            )
    except OSError as error:
        raise SourceError(f"cannot read {root}", reason=str(error)) from error
    if not files:
        raise SourceError(f"{root} has no files")
    return SourceSnapshot(root, files)


@contextmanager
def _opened(root: Path) -> Iterator[int]:
    try:
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"{root} is not a directory", hint="give the path of a repository's work tree") from error
    try:
        yield root_fd
    finally:
        os.close(root_fd)


def _check_place(root_fd: int, source: LocalSource) -> None:
    real_path = Path(os.readlink(f"/proc/self/fd/{root_fd}"))
    if source.within is not None and not any(map(real_path.is_relative_to, source.within)):
        allowed = ", ".join(map(str, source.within))
        raise SourceError(
            f"{source.path} leads to {real_path} now, outside of {allowed}", hint="see who changes it, and load again"
        )


def _tracked(root: Path) -> list[str] | None:
    """Return the files that git tracks or would add, including those of submodules; None outside a work tree."""
    paths = _listed(root, "--cached", "--others", "--exclude-standard")
    if paths is None:
        return None
    links = [entry.partition("\t")[2] for entry in _listed(root, "--stage") or () if entry.startswith("160000 ")]
    for link in links:
        if (root / link / ".git").exists():
            paths += [f"{link}/{path}" for path in _tracked(root / link) or ()]
    return paths


def _listed(root: Path, *options: str) -> list[str] | None:
    command = ["-C", str(root), "ls-files", "-z", *options, "--", "."]
    # In a work tree, a failure of git is an error: a plain listing would include ignored files.
    is_work_tree = any((folder / ".git").exists() for folder in (root, *root.parents))
    try:
        process = run_git(command, timeout=_LIST_TIMEOUT)
    except ProgramNotFound:
        if is_work_tree:
            raise
        return None
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"git took longer than {_LIST_TIMEOUT:.0f} s to list {root}") from error
    if process.returncode != 0:
        if is_work_tree:
            raise SourceError(
                f"git cannot list {root}", reason=process.stderr.decode("utf-8", "replace").strip()[-500:]
            )
        return None
    return [os.fsdecode(name) for name in process.stdout.split(b"\0") if name]


def _walked(root: Path) -> Iterator[str]:
    """Yield the paths below a directory, without following links."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != ".git"]
        yield from (os.path.relpath(f"{folder}/{name}", root) for name in (*names, *folders) if name != ".git")


def _read(root_fd: int, path: str) -> tuple[str, bytes] | None:
    """Return the kind and the content of a file, or the target of a link; None if the path is missing or special."""
    try:
        fd = sc.openat2(root_fd, path, os.O_PATH | os.O_NOFOLLOW, sc.RESOLVE_INSIDE)
    except OSError as error:
        if error.errno in _GONE:  # git also lists deleted files
            return None
        raise
    try:
        status = os.fstat(fd)
        if stat.S_ISLNK(status.st_mode):
            return "link", os.fsencode(os.readlink("", dir_fd=fd))
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > _LARGEST:
            raise SourceError(f"{path!r} is too large for a source", reason=f"it has {status.st_size} bytes")
        # Open the inode that was checked, because the path may have been replaced meanwhile.
        with open(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return ("program" if status.st_mode & stat.S_IXUSR else "file"), file.read(status.st_size)
    finally:
        os.close(fd)


def _member(path: str, kind: str, content: bytes) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    info = tarfile.TarInfo(path)
    info.mode = 0o755 if kind == "program" else 0o644
    if kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
        return info, None
    info.size = len(content)
    return info, io.BytesIO(content)
