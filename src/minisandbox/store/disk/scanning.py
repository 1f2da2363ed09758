"""List the entries of a finished layer tree, and hash the content of its files."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisandbox.errors import StoreError, UnfitTree
from minisandbox.store.entries import DIRECTORY, FIFO, FILE, LINK, WHITEOUT, Attributes, Entry

_CHUNK = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MACHINE = frozenset(f"user.overlay.{name}" for name in ("origin", "impure", "nlink", "uuid", "upper"))
"""Internal attributes of overlayfs (fs/overlayfs/overlayfs.h), which are valid only on this machine."""
_LONGEST_NAME = 200
_BLOCK = 512
"""Bytes of the unit that st_blocks counts on every file system (stat(2))."""
_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: LINK, stat.S_IFIFO: FIFO}


@dataclass(slots=True)
class Allowance:
    """Time limit for reading a tree: sparse files, shared blocks and many names are cheap to create but slow to read.

    Attributes:
        seconds: seconds from the creation of this object; None sets no limit.
    """

    seconds: float | None = None
    _start: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise an error if the time limit has passed.

        Raises:
            UnfitTree: the time limit has passed.
        """
        if self.seconds is not None and time.monotonic() - self._start > self.seconds:
            raise UnfitTree(
                "the tree takes too long to read",
                reason=f"after {self.seconds:.0f} s it was not listed and hashed",
                hint="leave less, or give the step more time (PythonRecipe.step_timeout)",
            )


@contextmanager
def opened_up(path: str | Path) -> Iterator[None]:
    """Give the owner all permissions on a file or directory while the body runs; skip links.

    Raises:
        OSError: the file belongs to another user.
    """
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    os.chmod(path, mode | stat.S_IRWXU)
    try:
        yield
    finally:
        os.chmod(path, mode)


def walk(tree: Path, restore_modes: ExitStack | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path relative to the tree, status) for the tree and all entries; a directory comes before its contents.

    The names in a directory are sorted, so that equal trees give equal lists.

    Args:
        tree: the directory.
        restore_modes: stack that later restores the modes of directories that had to be made readable by
            :func:`opened_up`; None changes no modes.

    Raises:
        OSError: a directory cannot be read.
    """
    base = os.fspath(tree)
    status = os.lstat(base)
    yield "", status
    pending = [""] if stat.S_ISDIR(status.st_mode) else []  # if the tree was replaced by a link, do not follow the link
    while pending:
        folder = pending.pop()
        for entry in _sorted_entries(f"{base}/{folder}", restore_modes):
            path = f"{folder}/{entry.name}" if folder else entry.name
            child_status = entry.stat(follow_symlinks=False)
            yield path, child_status
            if stat.S_ISDIR(child_status.st_mode):
                pending.append(path)


def _sorted_entries(folder: str, restore_modes: ExitStack | None) -> list[os.DirEntry[str]]:
    if restore_modes is not None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        restore_modes.enter_context(opened_up(folder))
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def scan(
    tree: Path, restore_modes: ExitStack, allowance: Allowance, digests: Mapping[int, str], plain: Collection[int]
) -> Iterator[Entry]:
    """Yield the entries of an unpublished tree; remove its sockets and overlayfs's internal attributes.

    A socket is useless once its server has exited, and tar archives cannot contain sockets.

    Args:
        tree: a tree that no process writes to any more.
        restore_modes: stack that later restores the modes of directories that the build left without permissions.
        allowance: time limit for reading the tree.
        digests: known SHA-256 of files' contents by inode; files with a known digest are not read.
        plain: inodes of those of these files that have no extended attributes.

    Raises:
        UnfitTree: reading the tree takes too long, or a path in it is too long.
        StoreError: the tree contains a device, or a file changed while it was read.
        OSError: a file or directory cannot be read.
    """
    try:
        yield from _scan_entries(tree, restore_modes, allowance, digests, plain)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename or "").removeprefix(f"{tree}/")
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME // 2]}...{name[-_LONGEST_NAME // 2 :]}"
        raise UnfitTree(
            "a path in the tree is too long",
            reason=f"the kernel takes 4,095 bytes, those of the store's directory among them; this has more: {name!r}",
            hint="remove directories that lie so deep in the command that makes them",
        ) from error


def _scan_entries(
    tree: Path, restore_modes: ExitStack, allowance: Allowance, digests: Mapping[int, str], plain: Collection[int]
) -> Iterator[Entry]:
    first_names: dict[int, Entry] = {}
    for path, status in walk(tree, restore_modes):
        if status.st_ino in plain and status.st_nlink == 1:
            mode, digest = stat.S_IMODE(status.st_mode), digests[status.st_ino]
            yield Entry(
                path, FILE, mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_size,
                status.st_blocks * _BLOCK, digest,
            )  # fmt: skip
            continue
        allowance.check()
        file_path = f"{tree}/{path}" if path else str(tree)
        if stat.S_ISSOCK(status.st_mode):
            os.unlink(file_path)
            continue
        first_entry = first_names.get(status.st_ino) if status.st_nlink > 1 else None
        if first_entry is not None:
            yield replace(first_entry, path=path, same=first_entry.path)
            continue
        entry = _readable_entry(path, file_path, status, allowance, digests.get(status.st_ino))
        _remove_handles(entry, file_path)
        if status.st_nlink > 1 and entry.kind not in (DIRECTORY, WHITEOUT):  # overlayfs hard-links whiteouts
            first_names[status.st_ino] = entry
        yield entry


def _readable_entry(
    path: str, file_path: str, status: os.stat_result, allowance: Allowance, digest: str | None
) -> Entry:
    """Return the entry of a file or directory, even if its owner has no read permission."""
    is_unreadable = stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IRUSR
    with opened_up(file_path) if is_unreadable else nullcontext():
        return describe(path, file_path, status, digest=digest, allowance=allowance)


def _remove_handles(entry: Entry, file_path: str) -> None:
    """Remove overlayfs's internal attributes: they differ in equal files and become stale when a layer is moved."""
    if entry.kind == WHITEOUT:
        _clear_whiteout(entry, file_path)
    overlay_names = [name for name, _ in entry.attributes if name in _MACHINE]
    if overlay_names:
        with nullcontext() if os.access(file_path, os.W_OK) else opened_up(file_path):
            for name in overlay_names:
                os.removexattr(file_path, name, follow_symlinks=False)
        entry.attributes = tuple(pair for pair in entry.attributes if pair[0] not in _MACHINE)


def _clear_whiteout(entry: Entry, file_path: str) -> None:
    """Clear a whiteout's mode and mtime, which overlayfs ignores, so that equal layers have equal file lists."""
    if entry.mode:
        os.chmod(file_path, 0)
    if entry.mtime:
        os.utime(file_path, ns=(0, 0), follow_symlinks=False)
    entry.mode = entry.mtime = 0


def describe(
    path: str, file_path: str, status: os.stat_result, *, digest: str | None = None, allowance: Allowance | None = None
) -> Entry:
    """Return the entry of a file, directory, link, FIFO or whiteout.

    Args:
        path: path in the layer.
        file_path: path on this machine.
        status: its status.
        digest: known SHA-256 of a file's content; None if the file must be read.
        allowance: time limit for reading the file; None sets no limit.

    Raises:
        UnfitTree: reading the file takes too long.
        StoreError: the path is a device, or the file changed while it was read.
        OSError: the path cannot be read.
    """
    kind = kind_of(status)
    if kind is None:
        raise StoreError(f"{file_path} is a device", reason="a layer holds files, directories and links")
    return Entry(
        path=path,
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime=status.st_mtime_ns,
        size=status.st_size if kind == FILE else 0,
        disk=status.st_blocks * _BLOCK,
        digest="" if kind != FILE else hash_file(file_path, status.st_size, allowance) if digest is None else digest,
        target=os.readlink(file_path) if kind == LINK else "",
        attributes=read_attributes(file_path) if kind in (FILE, DIRECTORY) else (),
    )


def kind_of(status: os.stat_result) -> str | None:
    """Return the entry kind for a file status, or None for a device other than a whiteout."""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return WHITEOUT
    return _KINDS.get(stat.S_IFMT(status.st_mode))


def hash_file(path: str, size: int, allowance: Allowance | None = None) -> str:
    """Return the SHA-256 of a file's content.

    Args:
        path: the file; a link is not followed, and opening a FIFO does not block.
        size: expected size in bytes.
        allowance: time limit for reading the file; None sets no limit.

    Raises:
        UnfitTree: reading the file takes too long.
        StoreError: the file does not have the expected size.
        OSError: the file cannot be read.
    """
    fd = os.open(path, _READ)
    try:
        digest, remaining = hashlib.sha256(), size
        while chunk := os.read(fd, min(remaining + 1, _CHUNK)):
            if allowance is not None:
                allowance.check()
            digest.update(chunk)
            remaining -= len(chunk)
            if remaining < 0:
                break
    finally:
        os.close(fd)
    if remaining:
        raise StoreError(f"{path} changed while it was read", reason=f"it had {size} bytes")
    return digest.hexdigest()


def read_attributes(path: str) -> Attributes:
    """Return the extended attributes of a file or directory, without security labels of this machine."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:  # the file system has no extended attributes, for example tmpfs before Linux 6.6
        return ()
    layer_names = sorted(
        name for name in names if name.startswith(("user.", "security.capability", "system.posix_acl"))
    )
    return tuple((name, os.getxattr(path, name, follow_symlinks=False).hex()) for name in layer_names)
