"""Parse unified diffs and check them before git applies them.

:func:`parse_patch` reads a patch as ``git apply -p1`` would, lists the files that it touches, and rejects a patch that
is malformed or would write outside the repository. It never reads a file system: git decides, inside a sandbox, whether
the patch applies.

The format: git's documentation of ``git diff`` ("Generating patch text with -p") and POSIX ``diff -u``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from minisandbox.errors import PatchError
from minisandbox.patches.paths import checked_path, header_path, same_path, text, unquoted


class FileStatus(enum.Enum):
    """What a patch does to one file."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"
    RENAMED = "renamed"
    COPIED = "copied"


_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_EPOCH = re.compile(rb"19(?:69-12-31|70-01-01)")
"""The date that ``diff -N`` writes for a missing file: the epoch, in the local time zone."""
_MODE = re.compile(r"(?:100[0-7]{3}|120000|160000)")
_STATUS_OF_MODE = {
    "old mode": None,
    "new mode": None,
    "new file mode": FileStatus.ADDED,
    "deleted file mode": FileStatus.DELETED,
}
_HEADERS = (
    *_STATUS_OF_MODE,
    "rename from",
    "rename to",
    "rename old",  # git wrote these before 2005 and still reads them (apply.c)
    "rename new",
    "copy from",
    "copy to",
    "similarity index",
    "dissimilarity index",
    "index",
)
_LINK = "120000"
_GITLINK = "160000"


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change that a patch makes to one file.

    Attributes:
        path: the file's path after the patch, relative to the repository; for a deleted file, its last path.
        status: the kind of change.
        old_path: the path before the patch; differs from ``path`` only for renamed and copied files.
        lines: the hunk lines, each with its sign: ``+``, ``-`` or a space. A blank context line may lack its sign.
        link: the target if the file becomes a symbolic link by the modes in the patch, else None. The target is empty
            if no hunk contains it.
    """

    path: str
    status: FileStatus
    old_path: str
    lines: tuple[bytes, ...] = field(default=(), repr=False)
    link: bytes | None = None

    def signed(self, sign: bytes) -> Iterator[bytes]:
        """Return the lines that have this sign (``b"+"``, ``b"-"`` or ``b" "``), with the sign removed."""
        return (line[1:] for line in self.lines if (line[:1] or b" ") == sign)


def parse_patch(patch: str | bytes, *, name: str = "the patch") -> tuple[FileChange, ...]:
    """Parse a unified diff and return its changes, file by file, in the order of the diff.

    Args:
        patch: a git diff or a plain unified diff with one leading directory (``a/``, ``b/``). Other text, e.g. a mail
            header or a signature, is ignored, as in git. An empty or blank patch has no changes.
        name: the name of the patch in errors, e.g. ``"the submission"`` or ``"tasks.jsonl, line 3: patch"``.

    Returns:
        The changes. A file that turns into a symbolic link, or back, has two changes: deleted and added.

    Raises:
        PatchError: the patch has NUL bytes, CRLF line endings, an absolute path, a path with ``..`` or ``.git``, a
            gitlink, or a hunk that does not fit its header; or it is no diff at all.
    """
    data = patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch
    if not data.strip():
        return ()
    _refuse_nul(data, name)
    parser = _Parser(data)
    try:
        return parser.parse()
    except PatchError as error:
        error.hint = error.hint or "make it with 'git diff'"
        raise error.about(f"{name}, line {parser.at + 1}") from None


def touched_files(patch: str | bytes, *, name: str = "the patch") -> tuple[str, ...]:
    """Return every path that a patch reads or writes, sorted and without duplicates; old names of renamed files count.

    Args:
        patch: as for :func:`parse_patch`.
        name: the name of the patch in errors.

    Raises:
        PatchError: see :func:`parse_patch`.
    """
    changes = parse_patch(patch, name=name)
    return tuple(sorted({path for change in changes for path in (change.path, change.old_path)}))


def removed_files(patch: str | bytes, *, name: str = "the patch") -> tuple[str, ...]:
    """Return the paths that a patch deletes or renames away, sorted; the arguments are those of :func:`parse_patch`."""
    changes = parse_patch(patch, name=name)
    present = {change.path for change in changes if change.status is not FileStatus.DELETED}
    removed = {change.path for change in changes if change.status is FileStatus.DELETED}
    removed |= {change.old_path for change in changes if change.status is FileStatus.RENAMED}
    return tuple(sorted(removed - present))


def explain_line_endings(changes: tuple[FileChange, ...]) -> str | None:
    """Name the files whose hunks have CRLF line endings, the usual reason why their patch does not apply.

    Args:
        changes: the result of :func:`parse_patch`.

    Returns:
        One sentence for an error's reason, or None if no hunk line ends in CRLF.
    """
    names = [change.path for change in changes if any(line.endswith(b"\r") for line in change.lines)]
    if not names:
        return None
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"the hunks of {listed} have CRLF line endings; they apply only where the repository's files have them too"


def _refuse_nul(patch: bytes, name: str) -> None:
    offset = patch.find(b"\0")
    if offset < 0:
        return
    line = patch.count(b"\n", 0, offset) + 1
    is_utf16 = patch[:2] in {b"\xff\xfe", b"\xfe\xff"}
    raise PatchError(
        f"{name}, line {line}: there is a NUL byte",
        reason="it was saved as UTF-16" if is_utf16 else "a binary file was diffed as text, or the patch is damaged",
        hint="save it as UTF-8" if is_utf16 else "make it with 'git diff --binary', which writes binary files as text",
    )


@dataclass(slots=True)
class _Draft:
    """A file change that the parser has not finished reading."""

    line: int
    git: bool
    name: str | None = None
    old: str | None = None
    new: str | None = None
    status: FileStatus = FileStatus.MODIFIED
    is_link: bool = False
    old_lines: int = 0
    content: bool = False  # the parser saw a hunk, a mode or a rename
    lines: list[bytes] = field(default_factory=list)


class _Parser:
    """A parser that reads the lines once; ``at`` is the index of the current line, or of the line at fault."""

    def __init__(self, data: bytes) -> None:
        self.lines = data.split(b"\n")
        self.unfinished = self.lines[-1] != b""  # the last line has no newline
        if not self.unfinished:
            self.lines.pop()
        self.at = 0
        self.follows_hunk = False

    def parse(self) -> tuple[FileChange, ...]:
        """Return the changes; a PatchError refers to the line at ``self.at``."""
        changes: list[FileChange] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith(b"diff --git "):
                changes.append(self._git_file())
            elif line.startswith(b"--- ") and self._starts(b"+++ ", 1):
                changes.append(self._plain_file())
            else:
                self._refuse_stray(line)
                self.follows_hunk = False
                self.at += 1
        if not changes:
            self.at = 0
            raise PatchError("there is no diff in it", reason="it is not a unified diff")
        return tuple(changes)

    def _starts(self, prefix: bytes, ahead: int = 0) -> bool:
        index = self.at + ahead
        return index < len(self.lines) and self.lines[index].startswith(prefix)

    def _refuse_stray(self, line: bytes) -> None:
        """Reject a line outside a hunk that git would skip, although the line seems to belong to a hunk."""
        if line.startswith(b"@@ -"):
            raise PatchError("a hunk without a file before it")
        if self.follows_hunk and line[:1] in {b"+", b"-", b" "} and line.rstrip() != b"--":
            raise PatchError(
                "there are more lines than the hunk's header says",
                reason="the patch was edited by hand, or written by a program that cannot count",
                hint="make it with 'git diff', or correct the counts of the @@ line above",
            )

    # --- headers of one file ------------------------------------------------------------------------------------------

    def _git_file(self) -> FileChange:
        header = self.lines[self.at]
        self._refuse_crlf(header)
        draft = _Draft(line=self.at, git=True, name=same_path(header[len(b"diff --git ") :]))
        self.at += 1
        while self.at < len(self.lines) and self._extended_header(draft, self.lines[self.at]):
            self.at += 1
        if self._starts(b"GIT binary patch"):
            self._binary(draft)
        elif self._starts(b"--- "):
            self._names(draft)
            self._hunks(draft)
        elif self._starts(b"Binary files ") or self._starts(b"Files "):
            raise PatchError("a binary file without its content", hint="make the patch with 'git diff --binary'")
        return self._finished(draft)

    def _plain_file(self) -> FileChange:
        draft = _Draft(line=self.at, git=False)
        epoch = _EPOCH.search(self.lines[self.at])
        self._names(draft)
        self._hunks(draft)
        if draft.status is FileStatus.MODIFIED and (epoch or not draft.old_lines):
            draft.status = FileStatus.ADDED  # git creates the file if it is missing (apply.c)
        return self._finished(draft)

    def _finished(self, draft: _Draft) -> FileChange:
        """Return the change; if it has no path or no content, raise a PatchError for the first line of the file."""
        end, self.at = self.at, draft.line
        new = draft.new or draft.name
        if new is None:
            raise PatchError("no path can be read from this header")
        if not draft.content:
            raise PatchError(f"the file {new!r} has a header and no change", reason="the patch was cut off here")
        self.at = end
        target = b"\n".join(line[1:] for line in draft.lines if not line.startswith(b"-")) if draft.is_link else None
        return FileChange(new, draft.status, draft.old or new, tuple(draft.lines), target)

    def _extended_header(self, draft: _Draft, line: bytes) -> bool:
        """Read one line between ``diff --git`` and the hunks; return False if it is no extended header."""
        key, value = _split_header(line)
        if key in _STATUS_OF_MODE:
            self._check_mode(draft, text(value), deleted=key == "deleted file mode")
            draft.status = _STATUS_OF_MODE[key] or draft.status
            draft.content = True
        elif key in {"rename from", "rename old", "copy from"}:
            draft.old = checked_path(text(unquoted(value)))
        elif key in {"rename to", "rename new", "copy to"}:
            draft.new = checked_path(text(unquoted(value)))
            draft.status = FileStatus.COPIED if key == "copy to" else FileStatus.RENAMED
            draft.content = True
        elif key == "index":
            mode = value.partition(b" ")[2]
            if mode:
                self._check_mode(draft, text(mode), deleted=draft.status is FileStatus.DELETED)
        elif not key:
            return False
        return True

    def _check_mode(self, draft: _Draft, mode: str, *, deleted: bool) -> None:
        if mode == _GITLINK and not deleted:
            raise PatchError(
                f"{draft.name or 'a file'!r} is a gitlink (a submodule or a nested repository)",
                hint="a patch may make and change files and symbolic links only",
            )
        draft.is_link = mode == _LINK and not deleted
        if not _MODE.fullmatch(mode):
            raise PatchError(f"{mode!r} is not a file's mode", reason="the patch is damaged")

    def _names(self, draft: _Draft) -> None:
        """Read the ``---`` and ``+++`` lines and check that they agree with the git header, if there is one."""
        old = self._name("--- ", draft.old or draft.name)
        if not self._starts(b"+++ "):
            raise PatchError("there is a '---' line without a '+++' line after it", reason="the patch was cut off here")
        new = self._name("+++ ", draft.new or draft.name)
        if old is None and new is None:
            raise PatchError("both sides of a file are /dev/null")
        status = FileStatus.ADDED if old is None else FileStatus.DELETED if new is None else FileStatus.MODIFIED
        if not draft.git:
            draft.status = status
        elif status is not (draft.status if draft.status in _STATUS_OF_MODE.values() else FileStatus.MODIFIED):
            # without the mode line, git would treat /dev/null as a file of the repository
            raise PatchError(
                "/dev/null does not agree with the header above",
                reason="there is no 'new file mode' or 'deleted file mode' line, or one too many",
            )
        draft.new = new or old
        draft.old = old if draft.status in {FileStatus.RENAMED, FileStatus.COPIED} else draft.new

    def _name(self, marker: str, expected: str | None) -> str | None:
        line = self.lines[self.at]
        self._refuse_crlf(line)
        path = header_path(line[len(marker) :])
        if None not in {path, expected} and path != expected:
            raise PatchError(
                f"{path!r} does not agree with {expected!r} in the header above",
                reason="the patch was edited by hand",
            )
        self.at += 1
        return path

    def _refuse_crlf(self, line: bytes) -> None:
        if line.endswith(b"\r"):
            raise PatchError(
                "the patch has CRLF line endings",
                reason="an editor, a web form or git's core.autocrlf converted it",
                hint="convert it back to LF, for instance with: sed -i 's/\\r$//' FILE",
            )

    # --- hunks and binary patches -------------------------------------------------------------------------------------

    def _hunks(self, draft: _Draft) -> None:
        if not self._starts(b"@@ -"):
            raise PatchError("a file's names without a hunk after them", reason="the patch was cut off here")
        while self._starts(b"@@ -"):
            self._hunk(draft)
        draft.content = True
        self.follows_hunk = True

    def _hunk(self, draft: _Draft) -> None:
        match = _HUNK.match(self.lines[self.at])
        if match is None:
            raise PatchError(f"a hunk header that cannot be read: {text(self.lines[self.at][:80])!r}")
        header = self.at
        want_old, want_new = (1 if count is None else int(count) for count in (match[2], match[4]))
        draft.old_lines += want_old
        old = new = 0
        self.at += 1
        while (old < want_old or new < want_new) and self.at < len(self.lines):
            line = self.lines[self.at]
            kind = line[:1]
            if kind not in {b" ", b"+", b"-", b"\\", b""}:
                break
            old += kind in {b" ", b"-", b""}
            new += kind in {b" ", b"+", b""}
            if kind != b"\\":
                draft.lines.append(line)
            self.at += 1
        self._check_hunk_end(header, (want_old, want_new), (old, new))
        if self._starts(b"\\ "):
            self.at += 1

    def _check_hunk_end(self, header: int, want: tuple[int, int], have: tuple[int, int]) -> None:
        if have != want:
            cut = self.at >= len(self.lines)
            self.at = header
            raise PatchError(
                f"the hunk's header says {want[0]} old and {want[1]} new lines, but {have[0]} and {have[1]} follow",
                reason="the patch was cut off" if cut else "the patch was edited by hand, or by something that trims",
            )
        if self.at == len(self.lines) and self.unfinished:
            self.at -= 1
            raise PatchError(
                "the last line of the patch has no newline",
                reason="the patch's text was trimmed",
                hint="add a newline at its end",
            )

    def _binary(self, draft: _Draft) -> None:
        """Skip ``GIT binary patch``: one or two blocks of a size line, base-85 lines and a blank line."""
        self.at += 1
        if not (self._starts(b"literal ") or self._starts(b"delta ")):
            raise PatchError("a binary patch without content", reason="the patch was cut off here")
        while self._starts(b"literal ") or self._starts(b"delta "):
            while self.at < len(self.lines) and self.lines[self.at]:
                self.at += 1
            if self.at == len(self.lines):
                raise PatchError("a binary patch without its end", reason="the patch was cut off here")
            self.at += 1
        draft.content = True


def _split_header(line: bytes) -> tuple[str, bytes]:
    """Split ``new file mode 100644`` into its header name and value; an unknown name becomes ""."""
    for key in _HEADERS:
        marker = key.encode() + b" "
        if line.startswith(marker):
            return key, line[len(marker) :]
    return "", b""
