"""Read and write host files for uploads and downloads.

The data that a sandbox sends is untrusted. It can only fill one new file or directory, which gets its final name once
it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from minisandbox.errors import FileAccessError
from minisandbox.launch.jobs import frames, trees
from minisandbox.launch.jobs.tree_writer import Attributes, TreeBuilder
from minisandbox.types import Transfer

MOST_ENTRIES = 1_000_000
_MOST_SKIPPED = 1 << 24
"""Limit for the paths of all skipped entries together, in characters."""
_DEEPEST = 4000
_LATEST = 1 << 62
_ANY_TIME = 1 << 93
"""Limit for times in nanoseconds: stat(2) has 64 bits of seconds."""
_LONGEST_REASON = 200


class Download:
    """Receives a file or directory tree.

    Args:
        local: destination on the host.
        limit: maximum bytes of all files together, or None.

    Raises:
        OSError: the destination's parent directory cannot be opened.
    """

    def __init__(self, local: Path, limit: int | None) -> None:
        self._local = local.absolute()
        self._limit = limit
        self._partial = f".minisandbox-{secrets.token_hex(8)}"
        self._parent = os.open(self._local.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._builder = TreeBuilder(os.dup(self._parent), replace=False, exact=False)
        self._kind = ""
        self._entries = self._files = self._size = self._skipped_size = 0
        self._skipped: list[tuple[str, str]] = []

    def take(self, header: frames.Header, payload: bytes) -> None:
        """Process one frame.

        Raises:
            AssertionError, LookupError, ValueError: the frame is malformed or unexpected.
            OSError: the host refused.
        """
        event = header["event"]
        assert isinstance(event, str)
        match event:
            case "data":
                self._count(len(payload))
                self._builder.data(payload)
            case "hole":
                size = header["size"]
                assert isinstance(size, int) and size > 0  # noqa: PT018 - both parts are about one value
                self._count(size)
                self._builder.hole(size)
            case "eof":
                self._builder.end()
            case "up":
                self._builder.up()
            case "directory" | "file" | "link" | "skip":
                self._take_entry(event, header)
            case _:
                raise ValueError(f"an event {event[:40]!r}")

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > (_LATEST if self._limit is None else self._limit):
            raise ValueError("more bytes than asked for")

    def _take_entry(self, event: str, header: frames.Header) -> None:
        self._entries += 1
        if self._entries > MOST_ENTRIES:
            raise ValueError("more entries than asked for")
        name = _text(header, "name")
        if self._builder.depth == 0:
            name = self._begin(event, name)
        # clamp the time: file systems can hold later times than utime(2) can set
        mtime = max(-_LATEST, min(_number(header, "mtime", -_ANY_TIME, _ANY_TIME), _LATEST))
        attributes = Attributes(_number(header, "mode", 0, 0o7777), mtime)
        try:
            self._add(event, name, attributes, header)
        except FileExistsError as error:
            raise ValueError(f"{name[:300]!r} twice") from error

    def _begin(self, event: str, name: str) -> str:
        """Check the first frame, whose name is empty; return the temporary name of the root."""
        if self._kind or name or event not in ("directory", "file"):
            raise ValueError(f"{event} {name[:300]!r} outside of the tree")
        self._kind = event
        self._check_destination()
        return self._partial

    def _add(self, event: str, name: str, attributes: Attributes, header: frames.Header) -> None:
        if event == "directory":
            if self._builder.depth >= _DEEPEST:
                raise FileAccessError(f"cannot copy what is more than {_DEEPEST} directories deep", errno=errno.ELOOP)
            self._builder.directory(name, attributes)
        elif event == "file":
            self._files += 1
            self._builder.file(name, attributes)
        elif event == "skip":
            self._skip(name, _text(header, "detail"))
        else:
            target = _text(header, "detail")
            reason = leaves_tree(target, self._builder.depth - 1)
            if reason:
                self._skip(name, reason)
            else:
                self._builder.link(name, target, attributes)

    def _skip(self, name: str, reason: str) -> None:
        self._builder.check(name)
        path = "/".join([*self._builder.walker.names[1:], name])
        self._skipped.append((path, reason[:_LONGEST_REASON]))
        self._skipped_size += len(path)
        if self._skipped_size > _MOST_SKIPPED:
            raise FileAccessError("too many links and other files that cannot be copied", errno=errno.E2BIG)

    def _check_destination(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self._local.name, dir_fd=self._parent, follow_symlinks=False)
            if self._kind == "directory":
                raise FileExistsError(errno.EEXIST, "a directory is copied to what does not exist", str(self._local))
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._local))

    def finish(self) -> None:
        """Check that the last frame completed the tree.

        Raises:
            ValueError: the tree is incomplete.
        """
        if not self._kind or not self._builder.idle:
            raise ValueError("the end in the middle")

    def publish(self) -> Transfer:
        """Rename the complete copy to its final name."""
        try:
            self._check_destination()
        except FileExistsError as error:
            raise FileExistsError(errno.EEXIST, "it came into being meanwhile", str(self._local)) from error
        os.rename(self._partial, self._local.name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._kind = ""
        return Transfer(self._files, self._size, tuple(self._skipped))

    def close(self) -> None:
        """Remove an unpublished copy, and close the descriptors."""
        self._builder.close()
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._kind == "directory":
                    trees.remove(self._parent, self._partial)
                elif self._kind:
                    os.unlink(self._partial, dir_fd=self._parent)
        finally:
            os.close(self._parent)


def leaves_tree(target: str, depth: int) -> str:
    """Return why a symbolic link is skipped, or "" if it is kept.

    Only leading ``..`` can be counted: after another name, which may be a link itself, ``..`` leads to the parent of
    that link's target. So a target is safe if it has at most as many leading ``..`` as the link is deep, and none
    later. The same holds for all other links of the tree, so it stays in the tree whatever links it passes through.

    Args:
        target: target of the link.
        depth: number of directories between the tree's root and the link.
    """
    if not target or "\0" in target:
        return "a link to nothing"
    if target.startswith("/"):
        return "a link to an absolute path"
    names = [name for name in target.split("/") if name not in ("", ".")]
    parent_count = next((number for number, name in enumerate(names) if name != ".."), len(names))
    if parent_count > depth or ".." in names[parent_count:]:
        return "a link that may lead out of the tree"
    return ""


def _text(header: frames.Header, key: str) -> str:
    text = header[key]
    assert isinstance(text, str)
    text.encode("utf-8", "surrogateescape")  # raises for a lone surrogate that encodes no byte
    return text


def _number(header: frames.Header, key: str, minimum: int, maximum: int) -> int:
    number = header.get(key, 0)
    assert isinstance(number, int)
    if not minimum <= number <= maximum:
        raise ValueError(f"a {key} of {number}")
    return number


class Upload:
    """Sends a host directory tree.

    Args:
        descriptor: descriptor of the directory; this object closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._walker = trees.DirWalker(descriptor)
        self._tally = trees.Tally(None, 1 << 62)
        self._skipped: list[tuple[str, str]] = []

    def pieces(self) -> Iterator[bytes]:
        """Yield the encoded frames of the tree, with small frames joined into larger pieces.

        Raises:
            OSError: an entry cannot be read.
        """
        yield from trees.batches(trees.tree_frames(self._steps(), self._tally))

    def _steps(self) -> Iterator[trees.TreeStep]:
        with contextlib.closing(trees.walk(self._walker)) as steps:
            for step in steps:
                if step.event == "skip":
                    self._skipped.append((self._walker.path(step.name), step.detail))
                else:
                    yield step

    @property
    def transfer(self) -> Transfer:
        """The files and bytes sent so far, and the skipped entries."""
        return Transfer(self._tally.files, self._tally.size, tuple(self._skipped))

    def close(self) -> None:
        """Close the descriptors."""
        self._walker.close()
