"""Write, copy and move directory trees below one directory, by descriptors and without following a link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass

from .trees import DirWalker, TreeStep, identity, pieces, walk_one
from .trees import remove as remove_tree

NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 16


@dataclass(frozen=True, slots=True)
class Attributes:
    """The metadata of a file or directory, set once its content is complete.

    Attributes:
        mode: permission bits.
        mtime: nanoseconds since the epoch.
        owner: uid and gid, or None to leave them.
    """

    mode: int
    mtime: int
    owner: tuple[int, int] | None = None


class FileWriter:
    """Writes a sparse file from its start.

    Args:
        descriptor: descriptor of the file; the writer closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self.fd = descriptor
        self._position = 0

    def data(self, content: bytes) -> None:
        """Append content."""
        while content:
            written = os.pwrite(self.fd, content, self._position)
            self._position += written
            content = content[written:]

    def hole(self, size: int) -> None:
        """Append a hole: zeros that take no disk space."""
        self._position += size

    def end(self) -> int:
        """Truncate the file to the appended size; return the size."""
        os.ftruncate(self.fd, self._position)
        return self._position

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class TreeBuilder:
    """Builds a directory tree from a sequence of entries.

    Args:
        root: descriptor of the directory to build in; the builder closes it.
        replace: whether files and links replace existing ones and directories are merged; otherwise an existing entry
            is an error.
        exact: whether to set modes as given. Otherwise the umask applies, the owner gets read and write permission,
            and setuid, setgid and sticky bits are dropped.
    """

    def __init__(self, root: int, *, replace: bool, exact: bool) -> None:
        self.walker = DirWalker(root)
        self._replace = replace
        self._exact = exact
        self._unfinished: list[Attributes | None] = []
        self._file: FileWriter | None = None
        self._attributes = Attributes(0, 0)

    @property
    def depth(self) -> int:
        """Number of directories that are begun but not ended."""
        return len(self._unfinished)

    @property
    def idle(self) -> bool:
        """Whether every file and directory that was begun is ended."""
        return not self._unfinished and self._file is None

    def directory(self, name: str, attributes: Attributes) -> None:
        """Begin a directory; an existing directory keeps its attributes.

        Raises:
            OSError: the directory cannot be created, or an existing entry is not a directory.
            ValueError: the name is invalid, or a file is not ended.
        """
        self.check(name)
        is_new = True
        try:
            os.mkdir(name, attributes.mode & 0o777 | 0o700, dir_fd=self.walker.fd)
        except FileExistsError:
            if not self._replace:
                raise
            is_new = False
        self.walker.down(name)
        self._unfinished.append(attributes if is_new else None)

    def up(self) -> None:
        """End a directory and set its attributes.

        Raises:
            ValueError: no directory is begun, or a file is not ended.
        """
        if not self._unfinished or self._file is not None:
            raise ValueError("the end of a directory that was not begun, or within a file")
        attributes = self._unfinished.pop()
        if attributes is not None:
            self._settle(self.walker.fd, attributes)
        self.walker.up()

    def file(self, name: str, attributes: Attributes) -> None:
        """Begin a file; its content follows, then :meth:`end`."""
        self.check(name)
        mode = 0o600 if self._exact else attributes.mode & 0o777 | 0o600
        for attempt in range(_TRIES):
            self._make_way(name)
            try:
                self._file = FileWriter(os.open(name, NEW_FILE_FLAGS, mode, dir_fd=self.walker.fd))
                break
            except FileExistsError:  # another process has just created it
                if not self._replace or attempt == _TRIES - 1:
                    raise
        self._attributes = attributes

    def data(self, content: bytes) -> None:
        """Append content to the file."""
        self._open_file().data(content)

    def hole(self, size: int) -> None:
        """Append a hole: zeros that take no disk space."""
        self._open_file().hole(size)

    def end(self) -> None:
        """End the file and set its attributes."""
        file = self._open_file()
        file.end()
        self._settle(file.fd, self._attributes)
        self._close_file()

    def link(self, name: str, target: str, attributes: Attributes) -> None:
        """Make a symbolic link."""
        self.check(name)
        self._make_way(name)
        os.symlink(target, name, dir_fd=self.walker.fd)
        if attributes.owner is not None:
            with contextlib.suppress(OSError):
                os.chown(name, *attributes.owner, dir_fd=self.walker.fd, follow_symlinks=False)
        os.utime(name, ns=(attributes.mtime, attributes.mtime), dir_fd=self.walker.fd, follow_symlinks=False)

    def close(self) -> None:
        """Close the descriptors; keep the written tree."""
        self._close_file()
        self.walker.close()

    def _settle(self, descriptor: int, attributes: Attributes) -> None:
        if attributes.owner is not None:  # before the mode, because chown(2) clears setuid
            try:
                os.chown(descriptor, *attributes.owner)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EINVAL):  # the owner has no id inside
                    raise
        if self._exact:
            os.fchmod(descriptor, attributes.mode)
        os.utime(descriptor, ns=(attributes.mtime, attributes.mtime))

    def _make_way(self, name: str) -> None:
        if self._replace:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.walker.fd)

    def check(self, name: str) -> None:
        """Check that an entry of this name can be created now.

        Raises:
            ValueError: the name is not a valid file name, or a file is not ended.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name[:300]!r} is no name of a file")
        if self._file is not None:
            raise ValueError(f"{name[:300]!r} within a file")

    def _open_file(self) -> FileWriter:
        if self._file is None:
            raise ValueError("content without a file")
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def move(source_directory: int, source: str, target_directory: int, target: str) -> None:
    """Rename a file or tree; if rename(2) fails with EXDEV, copy and remove it.

    rename(2) fails across mounts, and for a directory in a lower layer of overlayfs. The copy is written to the target
    directory and then renamed. Symbolic links are copied as links; hard links become separate files.

    Args:
        source_directory: descriptor of the source's parent directory.
        source: name of the source in it.
        target_directory: descriptor of the target's parent directory.
        target: name of the target in it.

    Raises:
        OSError: rename(2) failed, or the copy failed and was removed again.
    """
    try:
        os.rename(source, target, src_dir_fd=source_directory, dst_dir_fd=target_directory)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    else:
        return
    _check_not_below(os.stat(source, dir_fd=source_directory, follow_symlinks=False), target_directory)
    copy_name = f".{os.urandom(8).hex()}"
    try:
        _copy(source_directory, source, target_directory, copy_name)
        os.rename(copy_name, target, src_dir_fd=target_directory, dst_dir_fd=target_directory)
    except OSError:
        with contextlib.suppress(OSError):
            remove(target_directory, copy_name, recursive=True)
        raise
    remove(source_directory, source, recursive=True)


def remove(directory: int, name: str, *, recursive: bool) -> None:
    """Remove a file, a link or an empty directory; with ``recursive``, a whole tree."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=directory)
    elif recursive:
        remove_tree(directory, name)
    else:
        os.rmdir(name, dir_fd=directory)


def _check_not_below(source: os.stat_result, directory: int) -> None:
    """Raise EINVAL if the directory lies below the source, by walking up from it to the root."""
    current, child_identity = os.dup(directory), None
    try:
        while (current_identity := identity(os.fstat(current))) != child_identity:
            if current_identity == identity(source):
                raise OSError(errno.EINVAL, "the target lies below the source")
            parent = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current, child_identity = parent, current_identity
    finally:
        os.close(current)


def _copy(source_directory: int, source: str, target_directory: int, target: str) -> None:
    with (
        contextlib.closing(TreeBuilder(os.dup(target_directory), replace=False, exact=True)) as builder,
        contextlib.closing(DirWalker(os.dup(source_directory))) as walker,
    ):
        for step in walk_one(walker, source):
            _add(builder, step, step.name if builder.depth else target)


def _add(builder: TreeBuilder, step: TreeStep, name: str) -> None:
    if step.event == "up":
        builder.up()
    if step.status is None:  # the end of a directory, or an entry that has vanished
        return
    attributes = Attributes(
        stat.S_IMODE(step.status.st_mode), step.status.st_mtime_ns, (step.status.st_uid, step.status.st_gid)
    )
    if step.event == "directory":
        builder.directory(name, attributes)
    elif step.event == "link":
        builder.link(name, step.detail, attributes)
    elif step.event == "file":
        builder.file(name, attributes)
        for piece in pieces(step.descriptor, step.status.st_size):
            if isinstance(piece, int):
                builder.hole(piece)
            else:
                builder.data(piece)
        builder.end()
    else:
        os.mknod(name, step.status.st_mode, step.status.st_rdev, dir_fd=builder.walker.fd)
