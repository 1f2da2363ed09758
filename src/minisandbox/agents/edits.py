"""Perform the edit tool's actions with a sandbox's file operations, so that the host never resolves a path.

Files are decoded as UTF-8; invalid bytes are preserved (PEP 383). Only newlines separate lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

from minisandbox.agents.actions import (
    EDITOR,
    Create,
    Edit,
    FormatError,
    Insert,
    StrReplace,
    View,
    action_of,
    arguments_of,
)
from minisandbox.errors import FileAccessError, MiniSandboxError
from minisandbox.types import FileInfo, FileType
from minisandbox.values import MiB

MAX_FILE = 4 * MiB
"""Maximum bytes of a file that the tool edits; larger files need commands."""

_CONTEXT_LINES = 4
_MAX_ENTRIES = 1000
_MAX_LINE_NUMBERS = 10


class EditError(MiniSandboxError):
    """An edit is impossible. The message is for the model that requested it."""

    exit_code = 48


class FileOperations(Protocol):
    """The methods of :class:`.AsyncFiles` that edits use."""

    async def read_bytes(self, path: str, *, limit: int | None) -> bytes:
        """Read a file."""
        ...

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file."""
        ...

    async def stat(self, path: str) -> FileInfo:
        """Return a path's metadata."""
        ...

    async def list(self, path: str) -> tuple[FileInfo, ...]:
        """List a directory."""
        ...

    async def exists(self, path: str) -> bool:
        """Return whether a path exists."""
        ...


def command_of(edit: Edit) -> tuple[str, str]:
    """Return an edit as a recorded command: the name of the tool, and the arguments as JSON; a replay reads it."""
    return EDITOR, json.dumps(arguments_of(edit))


def edit_of(command: object) -> Edit | None:
    """Return the edit of a recorded command, or None for any other command."""
    if not isinstance(command, tuple) or len(command) != 2 or command[0] != EDITOR:
        return None
    try:
        arguments = json.loads(command[1])
        edit = action_of(EDITOR, arguments) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError, FormatError):
        return None
    return edit if isinstance(edit, Edit) else None


async def carry_out(edit: Edit, files: FileOperations) -> str:
    """Perform an edit.

    Returns:
        The report for the model: the file's lines, or those around the change.

    Raises:
        EditError: the edit is impossible; the file is unchanged.
        SandboxGone: the sandbox has ended.
    """
    try:
        match edit:
            case View():
                return await _view(edit, files)
            case Create():
                return await _create(edit, files)
            case StrReplace():
                return await _replace(edit, files)
            case Insert():
                return await _insert(edit, files)
    except FileAccessError as error:
        raise EditError(error.what) from error


async def _view(edit: View, files: FileOperations) -> str:
    if (await files.stat(edit.path)).type is FileType.DIRECTORY:
        if edit.view_range is not None:
            raise EditError(f"{edit.path} is a directory: it has no lines")
        return _listing(await files.list(edit.path))
    lines = _lines(await _read(edit.path, files))
    first_line, last_line = edit.view_range or (1, -1)
    end = len(lines) if last_line == -1 else min(last_line, len(lines))
    if not lines:
        return f"{edit.path} is empty"
    if not 1 <= first_line <= end:
        raise EditError(f"lines {first_line} to {last_line}: {edit.path} has lines 1 to {len(lines)}")
    return _numbered(lines[first_line - 1 : end], first_line)


def _listing(entries: tuple[FileInfo, ...]) -> str:
    lines = [entry.path.name + ("/" if entry.type is FileType.DIRECTORY else "") for entry in entries[:_MAX_ENTRIES]]
    if len(entries) > _MAX_ENTRIES:
        lines.append(f"... and {len(entries) - _MAX_ENTRIES} more")
    return _encodable("\n".join(lines)) or "an empty directory"


async def _create(edit: Create, files: FileOperations) -> str:
    if await files.exists(edit.path):
        raise EditError(f"{edit.path} exists already; replace a text in it, or write it with a command")
    text = _with_newline(edit.file_text)
    await files.write_bytes(edit.path, text.encode())
    return f"{edit.path} was created, with {len(_lines(text))} lines"


async def _replace(edit: StrReplace, files: FileOperations) -> str:
    text = await _read(edit.path, files)
    offsets = _offsets(text, edit.old_str)
    offset = next(offsets, None)
    if offset is None:
        crlf_hint = "; its lines end in \\r\\n" if "\r\n" in text and "\r" not in edit.old_str else ""
        raise EditError(f"{edit.path} does not hold the old text; it must be exactly as in the file{crlf_hint}")
    if next(offsets, None) is not None:
        raise EditError(_ambiguous(edit, text))
    edited = text[:offset] + edit.new_str + text[offset + len(edit.old_str) :]
    await _write(edit.path, edited, files)
    return _report(edit.path, edited, offset, len(edit.new_str))


def _offsets(text: str, fragment: str) -> Iterator[int]:
    """Yield the offsets of all non-overlapping occurrences of a fragment in a text."""
    offset = text.find(fragment)
    while offset >= 0:
        yield offset
        offset = text.find(fragment, offset + len(fragment))


def _ambiguous(edit: StrReplace, text: str) -> str:
    line_numbers: list[str] = []
    line_number, line_offset = 1, 0
    for offset in _offsets(text, edit.old_str):
        line_number, line_offset = line_number + text.count("\n", line_offset, offset), offset
        line_numbers.append(str(line_number))
        if len(line_numbers) > _MAX_LINE_NUMBERS:
            line_numbers[-1] = "..."
            break
    return (
        f"{edit.path} holds the old text at lines {', '.join(line_numbers)}; "
        "take in more lines, so that it is there once"
    )


async def _insert(edit: Insert, files: FileOperations) -> str:
    text = await _read(edit.path, files)
    lines = text.split("\n")
    line_count = len(_lines(text))
    if not 0 <= edit.insert_line <= line_count:
        raise EditError(f"line {edit.insert_line}: {edit.path} has lines 1 to {line_count}; 0 is before the first")
    head = "".join(line + "\n" for line in lines[: edit.insert_line])
    inserted = _with_newline(edit.new_str)
    edited = head + inserted + text[len(head) :]
    await _write(edit.path, edited, files)
    return _report(edit.path, edited, len(head), len(inserted))


async def _read(path: str, files: FileOperations) -> str:
    data = await files.read_bytes(path, limit=MAX_FILE)
    if b"\0" in data:
        raise EditError(f"{path} is a binary file; use a command")
    return data.decode("utf-8", "surrogateescape")


async def _write(path: str, text: str, files: FileOperations) -> None:
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > MAX_FILE:
        raise EditError(f"{path} would have more than {MAX_FILE} bytes; use a command")
    await files.write_bytes(path, data)


def _with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _report(path: str, text: str, offset: int, length: int) -> str:
    """Format the changed lines of the new text, with context, as the report of an edit."""
    first_changed = text.count("\n", 0, offset) + 1
    last_changed = first_changed + text.count("\n", offset, offset + length)
    first_line = max(1, first_changed - _CONTEXT_LINES)
    lines = _lines(text)[first_line - 1 : last_changed + _CONTEXT_LINES]
    return f"{path} was changed:\n{_numbered(lines, first_line)}" if lines else f"{path} is empty now"


def _numbered(lines: list[str], first_line: int) -> str:
    return _encodable("\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, start=first_line)))


def _encodable(text: str) -> str:
    """Replace bytes that are not UTF-8 by U+FFFD, because surrogates cannot be sent to a model."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
