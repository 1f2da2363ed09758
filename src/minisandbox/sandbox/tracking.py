"""Follow the changes of a workspace from turn to turn, as git patches against its image.

A second sandbox sees the workspace's uppers and its image, as in :mod:`.comparing`, and keeps running. For each patch
it sends only the files that were written since the last one, and this process creates the patch without git. Only for
new files, git in the workspace reports whether they are ignored.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from minisandbox.errors import FileAccessError, MiniSandboxError
from minisandbox.launch.jobs import frames
from minisandbox.sandbox._async.sandbox import AsyncSandbox
from minisandbox.sandbox.comparing import Viewer
from minisandbox.sandbox.core import Core
from minisandbox.sandbox.io_async import call_blocking
from minisandbox.sandbox.protocol.wire import Call

_LARGEST_FILE = 1 << 20
_MOST_CHARACTERS = 1 << 18
_TIMEOUT = 10.0
_SLOW_DIFF = 1 << 22
"""Product of the numbers of old and new lines; a larger region is replaced instead of compared."""


@dataclass(frozen=True, slots=True)
class _File:
    """A written file: the mark of its state, whether the image lacks it, its part of the patch, or why it has none."""

    mark: list[int] | None
    is_new: bool
    diff: bytes
    problem: str = ""


class _ContentsCall(Call):
    """Request the files that changed since the last request.

    Args:
        tree_count: number of uppers.
        compared_path: the directory to compare.
        files: the files reported before.
    """

    def __init__(self, tree_count: int, compared_path: PurePosixPath, files: dict[str, _File]) -> None:
        options = {
            "trees": tree_count,
            "below": str(compared_path),
            "content": _LARGEST_FILE,
            "characters": _MOST_CHARACTERS,
        }
        marks = {path: file.mark for path, file in files.items() if file.mark is not None}
        super().__init__({"verb": "changes", **options}, json.dumps(marks).encode(), max_answer=2 * _LARGEST_FILE)
        self._compared_path, self._known_files = str(compared_path), files
        self.files: dict[str, _File] = {}

    def _answer(self, header: frames.Header, payload: bytes) -> None:
        if header["event"] == "end":
            self.files |= {path: self._known_files[path] for path in json.loads(payload)}
            self.done = True
            return
        path, mark, sizes = header["path"], header["mark"], header["sizes"]
        new_mode, old_mode = header["new"], header["old"]
        assert isinstance(path, str)
        assert isinstance(sizes, list)
        assert mark is None or isinstance(mark, list)
        assert isinstance(new_mode, int)
        assert isinstance(old_mode, int)
        new, old = payload[: max(0, sizes[0])], payload[max(0, sizes[0]) :]
        name = path.removeprefix(self._compared_path.rstrip("/") + "/")
        if min(sizes) < 0:
            problem = f"{name[:200]} has more than {_LARGEST_FILE >> 20} MiB"
            self.files[path] = _File(mark, not old_mode, b"", problem)
            return
        self.files[path] = _File(mark, not old_mode, file_diff(name, (old_mode, old), (new_mode, new)))

    def result(self) -> dict[str, _File]:
        """Return all files that were written, by path.

        Raises:
            FileAccessError: a path could not be compared.
        """
        self._raise_error()
        return self.files


class ChangeTracker:
    """Follows the changes below a workspace's working directory.

    Args:
        box: the sandbox.
        core: its core.
    """

    def __init__(self, box: AsyncSandbox, core: Core) -> None:
        self._box, self._core = box, core
        self._viewer: Viewer | None = None
        self._viewed_run: object = None
        self._files: dict[str, _File] = {}
        self._ignored: dict[str, bool] = {}

    async def patch(self) -> bytes:
        """Return a git patch of the changes since the image, without files that git ignores.

        Raises:
            FileAccessError: a path could not be compared, a file is too large, or there are too many changes.
            SandboxGone: the sandbox has ended.
            SandboxCreationError: the second sandbox could not be created.
        """
        self._files = await call_blocking(self._update)
        written = {path: file for path, file in sorted(self._files.items()) if file.diff or file.problem}
        unknown = [path for path, file in written.items() if file.is_new and path not in self._ignored]
        if unknown:
            await self._ask_git(unknown)
        shown = {path: file for path, file in written.items() if not (file.is_new and self._ignored[path])}
        for path, file in shown.items():
            if file.problem:
                raise FileAccessError(file.problem, path=path)
        return b"".join(file.diff for file in shown.values())

    async def close(self) -> None:
        """Stop the second sandbox; calling it again does nothing."""
        if self._viewer is not None:
            viewer, self._viewer = self._viewer, None
            await call_blocking(viewer.end)

    def _update(self) -> dict[str, _File]:
        compared_path = self._core.image.workdir
        current_run, tree_count = self._core.uppers()
        if self._viewer is None or current_run is not self._viewed_run:  # a reset or snapshot began another run
            if self._viewer is not None:
                self._viewer.end()
            self._viewer, self._viewed_run, self._files = self._core.open_viewer("a patch"), current_run, {}
        call = _ContentsCall(tree_count, compared_path, self._files)
        self._viewer.answer(call, _TIMEOUT)
        return call.result()

    async def _ask_git(self, paths: Sequence[str]) -> None:
        """Ask git in the workspace which new files it ignores; if git fails, no file is ignored."""
        compared_path = self._core.image.workdir
        names = [str(PurePosixPath(path).relative_to(compared_path)) for path in paths]
        command = ["git", "-c", "core.fsmonitor=false", "check-ignore", "-z", "--stdin"]
        stdin = "\0".join(names).encode("utf-8", "surrogateescape")
        ignored: set[str] = set()
        try:
            result = await self._box.exec(command, stdin=stdin, timeout=_TIMEOUT)
            ignored = set(result.stdout_bytes.decode("utf-8", "surrogateescape").split("\0"))
        except MiniSandboxError:
            pass
        self._ignored |= {path: name in ignored for path, name in zip(paths, names, strict=True)}


def track_changes(box: AsyncSandbox) -> ChangeTracker | None:
    """Return a tracker of a sandbox that this process created; None for attached sandboxes and other engines."""
    core = getattr(box, "_core", None)
    return ChangeTracker(box, core) if isinstance(core, Core) else None


def file_diff(name: str, old: tuple[int, bytes], new: tuple[int, bytes]) -> bytes:
    """Return the part of a git patch that changes one file; empty if both states are equal.

    Args:
        name: the file's path.
        old: its mode and content before, or the mode 0 if there was no file.
        new: its mode and content after, or the mode 0 if there is no file.
    """
    (old_mode, before), (new_mode, after) = old, new
    if old == new:
        return b""
    if old_mode and new_mode and (old_mode ^ new_mode) & 0o170000:  # a file became a link, or a link a file
        return file_diff(name, old, (0, b"")) + file_diff(name, (0, b""), new)
    lines = [b"diff --git %s %s" % (_quoted("a/", name), _quoted("b/", name))]
    if not old_mode:
        lines.append(b"new file mode %o" % new_mode)
    elif not new_mode:
        lines.append(b"deleted file mode %o" % old_mode)
    elif old_mode != new_mode:
        lines += [b"old mode %o" % old_mode, b"new mode %o" % new_mode]
    if before != after:
        mode = b" %o" % new_mode if old_mode == new_mode else b""
        lines.append(b"index %s..%s%s" % (_blob(old_mode, before), _blob(new_mode, after), mode))
        if b"\0" in before + after:
            lines += [b"GIT binary patch", *_binary(after), b"", *_binary(before), b""]
        else:
            lines.append(b"--- " + (_quoted("a/", name) if old_mode else b"/dev/null"))
            lines.append(b"+++ " + (_quoted("b/", name) if new_mode else b"/dev/null"))
            lines += _hunks(_lines(before), _lines(after))
    return b"\n".join(lines) + b"\n"


def _quoted(prefix: str, name: str) -> bytes:
    """Return a path as git writes it: quoted if it has special characters."""
    raw = (prefix + name).encode("utf-8", "surrogateescape")
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in raw):
        return raw
    plain = (bytes([byte]) if 0x20 <= byte < 0x7F and byte not in b'"\\' else b"\\%03o" % byte for byte in raw)
    return b'"' + b"".join(plain) + b'"'


def _blob(mode: int, content: bytes) -> bytes:
    """Return the git object id of a file content, or zeros if there is no file."""
    if not mode:
        return b"0" * 40
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest().encode()


def _binary(content: bytes) -> Iterator[bytes]:
    """Yield the lines of a binary hunk: base 85, with the length of each line encoded in its first letter."""
    yield b"literal %d" % len(content)
    packed = zlib.compress(content)
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        yield bytes([len(piece) + (64 if len(piece) <= 26 else 70)]) + base64.b85encode(piece, pad=True)


def _hunks(before: list[bytes], after: list[bytes]) -> Iterator[bytes]:
    for group in _grouped(before, after):
        (_, start_before, _, start_after, _), (_, _, end_before, _, end_after) = group[0], group[-1]
        yield b"@@ -%s +%s @@" % (_range(start_before, end_before), _range(start_after, end_after))
        for tag, first, end, new_first, new_end in group:
            if tag == "equal":
                yield from _marked(b" ", before[first:end])
                continue
            yield from _marked(b"-", before[first:end])
            yield from _marked(b"+", after[new_first:new_end])


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def _grouped(before: list[bytes], after: list[bytes]) -> Iterator[list[tuple[str, int, int, int, int]]]:
    """Yield the hunks with three lines of context; only the lines between the common start and end are compared."""
    shorter, head = min(len(before), len(after)), 0
    while head < shorter and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shorter - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    inner: list[tuple[str, int, int, int, int]] = [("replace", 0, len(old), 0, len(new))]
    if len(old) * len(new) <= _SLOW_DIFF:
        inner = list(matcher.get_opcodes())
    matcher.opcodes = [  # type: ignore[attr-defined] # what get_opcodes caches, read by get_grouped_opcodes
        ("equal", 0, head, 0, head),
        *((tag, a + head, b + head, c + head, d + head) for tag, a, b, c, d in inner),
        ("equal", len(before) - tail, len(before), len(after) - tail, len(after)),
    ]
    return (
        [code for code in group if code[1] != code[2] or code[3] != code[4]] for group in matcher.get_grouped_opcodes(3)
    )


def _range(start: int, end: int) -> bytes:
    length = end - start
    return b"%d,%d" % (start if not length else start + 1, length)


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line.removesuffix(b"\n")
        if not line.endswith(b"\n"):
            yield b"\\ No newline at end of file"
