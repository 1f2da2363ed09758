"""Build the requests of file operations and ``usage``, and check the worker's answers."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import BinaryIO

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone
from minisandbox.launch.jobs import frames, trees
from minisandbox.sandbox.protocol.host_trees import Download, Upload
from minisandbox.sandbox.protocol.wire import Call
from minisandbox.sandbox.validation import check_path
from minisandbox.types import FileInfo, FileType, SandboxUsage

_ZEROS = bytes(trees.CHUNK)
_LONGEST_MESSAGE = 1000
_MOST_NUMBER = 1 << 63
_MOST_TEXT = 1 << 27
_WORDS = {"mkdir": "make directory", "send_tree": "download", "take_tree": "upload to"}
FILE_TYPES = {
    stat.S_IFREG: FileType.FILE,
    stat.S_IFDIR: FileType.DIRECTORY,
    stat.S_IFLNK: FileType.SYMLINK,
    stat.S_IFIFO: FileType.FIFO,
    stat.S_IFSOCK: FileType.SOCKET,
    stat.S_IFCHR: FileType.DEVICE,
    stat.S_IFBLK: FileType.DEVICE,
}

Piece = bytes | int
"""A piece of file content: bytes, or the size of a hole."""


def checked_path(path: str | PurePosixPath) -> str:
    """Return a path as a string that can be sent to the worker.

    Raises:
        InvalidValue: the path contains a NUL or a lone surrogate.
    """
    check_path("path", path)
    text = str(path)
    try:
        if b"\0" not in text.encode("utf-8", "surrogateescape"):
            return text
    except UnicodeEncodeError:
        pass
    raise InvalidValue(f"{text!r} is not a path", reason="a NUL or a lone surrogate is in it")


def request(verb: str, path: str | PurePosixPath, cwd: str, **options: object) -> frames.Header:
    """Return the header of a request.

    Raises:
        InvalidValue: the path or a mode is invalid.
    """
    mode = options.get("mode")
    if mode is not None and (type(mode) is not int or not 0 <= mode <= 0o7777):
        raise InvalidValue(f"mode {mode!r} is not permission bits", hint="give 0 to 0o7777")
    return {"verb": verb, "path": checked_path(path), "cwd": cwd, **options}


class _FileCall(Call):
    """Base of the calls of this module.

    Attributes:
        subject: subject of the error message; "" for the path that the worker reports.
    """

    def __init__(self, header: frames.Header, *, max_answer: int = 0) -> None:
        super().__init__(header, max_answer=max_answer)
        self.subject = ""

    def _take(self, header: frames.Header, payload: bytes) -> None:
        if self.done:
            raise ValueError("an answer after the last")
        super()._take(header, payload)

    def _check(self) -> None:
        """Raise the error that the worker answered, or SandboxGone if there was no answer."""
        if not self.done:
            raise SandboxGone("a file verb was cut off", reason="its worker was killed from inside")
        if self._error is None:
            return
        number, operation = self._error.get("errno"), str(self._request["verb"])
        path, message = str(self._error.get("path")), str(self._error.get("message"))[:_LONGEST_MESSAGE]
        failure = f"cannot {_WORDS.get(operation, operation)} {(self.subject or path)[:_LONGEST_MESSAGE]}: {message}"
        raise FileAccessError(failure, path=path, errno=number if isinstance(number, int) else None)


class DoneCall(_FileCall):
    """Request an operation without a result."""

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - there is none
        _expect(header, "done")
        self.done = True

    def result(self) -> None:
        """Raise the error if the operation failed."""
        self._check()


class UploadCall(DoneCall):
    """Send a directory tree."""

    def __init__(self, header: frames.Header, source: Upload) -> None:
        super().__init__(header)
        self._source = source

    def outgoing(self) -> Iterator[bytes]:
        """Return the request, the content in pieces, and its end."""
        yield from super().outgoing()
        yield from self._source.pieces()
        yield frames.encode({"event": "end"})


class DownloadCall(_FileCall):
    """Receive a file or directory tree."""

    def __init__(self, header: frames.Header, target: Download) -> None:
        super().__init__(header, max_answer=trees.CHUNK)
        self._target = target

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        if header["event"] == "end":
            self._target.finish()
            self.done = True
        else:
            self._target.take(header, payload)

    def result(self) -> None:
        """Raise the error if the tree was not received completely."""
        self._check()


class ReadCall(_FileCall):
    """Read a regular file into a stream; see :func:`read`."""

    def __init__(self, path: str | PurePosixPath, *, cwd: str, limit: int | None, sink: BinaryIO) -> None:
        super().__init__(request("read", path, cwd, limit=limit), max_answer=trees.CHUNK)
        self._sink = sink
        self._limit = limit
        self._size = 0

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        size = _size(header["size"]) if header["event"] == "hole" else len(payload)
        self._size += size
        if self._limit is not None and self._size > self._limit:
            raise ValueError("more bytes than asked for")
        if header["event"] == "data":
            self._sink.write(payload)
        elif header["event"] == "hole":
            for start in range(0, size, len(_ZEROS)):
                self._sink.write(_ZEROS[: size - start])
        else:
            _expect(header, "end")
            self.done = True

    def result(self) -> int:
        """Return the result, or raise the error."""
        self._check()
        return self._size


class WriteCall(_FileCall):
    """Write a regular file from a stream; see :func:`write`.

    Args:
        path: path inside.
        cwd: absolute directory inside.
        mode: permission bits, or None to keep them.
        source: pieces of the content.
        mtime: modification time in nanoseconds since the epoch, or None for now.
    """

    def __init__(
        self,
        path: str | PurePosixPath,
        *,
        cwd: str,
        mode: int | None,
        source: Iterable[Piece],
        mtime: int | None = None,
    ) -> None:
        super().__init__(request("write", path, cwd, mode=mode, mtime=mtime))
        self._source = source
        self._size = 0

    def outgoing(self) -> Iterator[bytes]:
        """Return the request, the content in pieces, and its end."""
        yield from super().outgoing()
        for piece in self._source:
            yield from self._frames(piece)
        yield frames.encode({"event": "end"})

    def _frames(self, piece: Piece) -> Iterator[bytes]:
        self._size += piece if isinstance(piece, int) else len(piece)
        if isinstance(piece, int):
            yield frames.encode({"event": "hole", "size": piece})
            return
        view = memoryview(piece)
        for start in range(0, len(view), trees.CHUNK):
            yield frames.encode({"event": "data"}, bytes(view[start : start + trees.CHUNK]))

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - there is none
        _expect(header, "done")
        self.done = True

    def result(self) -> int:
        """Return the result, or raise the error."""
        self._check()
        return self._size


class EntriesCall(_FileCall):
    """Request the status of one path, or of all entries of a directory."""

    def __init__(self, verb: str, path: str | PurePosixPath, cwd: str, *, max_entries: int, **options: object) -> None:
        super().__init__(request(verb, path, cwd, most=max_entries, **options))
        self._directory = PurePosixPath(cwd, path)
        self._single = verb == "stat"
        self._max_entries = max_entries
        self._infos: list[FileInfo] = []
        self._text_size = 0

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - there is none
        if header["event"] == "end" and not self._single:
            self.done = True
            return
        _expect(header, "entries")
        entries = header["entries"]
        assert isinstance(entries, list)
        if len(entries) + len(self._infos) > self._max_entries:
            raise ValueError("more entries than asked for")
        self._infos.extend(self._info(entry) for entry in entries)
        if self._single:
            assert self._infos
            self.done = True

    def _info(self, entry: object) -> FileInfo:
        assert isinstance(entry, list)
        name, bits, size, mtime, uid, gid, target = entry
        assert isinstance(name, str)
        assert isinstance(mtime, int)
        assert target is None or isinstance(target, str)
        bits = _size(bits)
        if (name == "") != self._single or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name[:300]!r} is no name of a file")
        name.encode("utf-8", "surrogateescape")
        self._text_size += len(name) + len(target or "")
        if self._text_size > _MOST_TEXT:
            raise ValueError("longer names and targets than allowed")
        return FileInfo(
            self._directory / name, FILE_TYPES[stat.S_IFMT(bits)], _size(size), stat.S_IMODE(bits), mtime / 1e9,
            _size(uid), _size(gid), target,
        )  # fmt: skip

    def result(self) -> list[FileInfo]:
        """Return the result, or raise the error."""
        self._check()
        return self._infos


class UsageCall(_FileCall):
    """Request the current resource use of the sandbox."""

    def __init__(self) -> None:
        super().__init__({"verb": "usage"})
        self._usage: SandboxUsage | None = None

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - there is none
        _expect(header, "usage")
        cpu = header["cpu"]
        assert isinstance(cpu, float)
        if not 0 <= cpu < _MOST_NUMBER:
            raise ValueError(f"{cpu} seconds")
        self._usage = SandboxUsage(cpu, _size(header["memory"]), _size(header["disk"]), _size(header["processes"]))
        self.done = True

    def result(self) -> SandboxUsage:
        """Return the result, or raise the error."""
        self._check()
        assert self._usage is not None
        return self._usage


def _size(number: object) -> int:
    assert isinstance(number, int)
    if not 0 <= number < _MOST_NUMBER:
        raise ValueError(f"a number of {number}")
    return number


def _expect(header: frames.Header, event: str) -> None:
    if header["event"] != event:
        raise ValueError(f"an event {str(header['event'])[:40]!r}")
