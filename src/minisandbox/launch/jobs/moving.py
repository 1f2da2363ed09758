"""Moving a file or tree, also where rename(2) cannot."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from . import trees
from .tree_writer import Attributes, Builder


def move(source_directory: int, source: str, target_directory: int, target: str) -> None:
    """Rename; where that is between mounts, or of a directory that overlayfs has in a lower layer: copy and remove.

    The copy is made beside the target and renamed into place. Links are copied as links. Hard links become files of
    their own.

    Args:
        source_directory: descriptor of the directory that the source is in.
        source: its name there.
        target_directory: descriptor of the directory that it goes to.
        target: its name there.

    Raises:
        OSError: as rename(2), or the copy failed; nothing of it stays.
    """
    try:
        os.rename(source, target, src_dir_fd=source_directory, dst_dir_fd=target_directory)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    else:
        return
    _check_not_below(os.stat(source, dir_fd=source_directory, follow_symlinks=False), target_directory)
    copy = f".{os.urandom(8).hex()}"
    try:
        _copy(source_directory, source, target_directory, copy)
        os.rename(copy, target, src_dir_fd=target_directory, dst_dir_fd=target_directory)
    except OSError:
        with contextlib.suppress(OSError):
            remove(target_directory, copy, recursive=True)
        raise
    remove(source_directory, source, recursive=True)


def remove(directory: int, name: str, *, recursive: bool) -> None:
    """Remove a file, a link or a directory, and (``recursive``) what is below it."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=directory)
    elif recursive:
        trees.remove(directory, name)
    else:
        os.rmdir(name, dir_fd=directory)


def _check_not_below(source: os.stat_result, directory: int) -> None:
    """Refuse to copy a tree into itself: climb from the target to the root."""
    here, known = os.dup(directory), None
    try:
        while (place := trees.identity(os.fstat(here))) != known:
            if place == trees.identity(source):
                raise OSError(errno.EINVAL, "the target lies below the source")
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here, known = above, place
    finally:
        os.close(here)


def _copy(source_directory: int, source: str, target_directory: int, target: str) -> None:
    builder = Builder(os.dup(target_directory), replace=False, exact=True)
    cursor = trees.Cursor(os.dup(source_directory))
    try:
        for step in trees.walk_one(cursor, source):
            _add(builder, step, step.name if builder.depth else target)
    finally:
        cursor.close()
        builder.close()


def _add(builder: Builder, step: trees.Step, name: str) -> None:
    if step.event == "up":
        builder.up()
    if step.status is None:  # the end of a directory, or something that was removed meanwhile
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
        for piece in trees.pieces(step.descriptor, step.status.st_size):
            if isinstance(piece, int):
                builder.hole(piece)
            else:
                builder.data(piece)
        builder.end()
    else:
        os.mknod(name, step.status.st_mode, step.status.st_rdev, dir_fd=builder.cursor.fd)
