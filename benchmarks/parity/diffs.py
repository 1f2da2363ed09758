"""Patches as files and hunks that can be edited: reading them, and writing them with counts that fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_LINES = re.compile(r"[^\n]*\n|[^\n]+\Z")


@dataclass(frozen=True, slots=True)
class Hunk:
    """A hunk.

    Attributes:
        start: the line of the old file that it starts at, as its header says it.
        tail: what its header says behind the numbers, the line's end included.
        lines: its lines, each with its sign and its end.
    """

    start: int
    tail: str
    lines: tuple[str, ...]

    def count(self, signs: str) -> int:
        """How many lines have one of these signs."""
        return sum(line[0] in signs for line in self.lines)

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.count("+-") > 0


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a patch does to one file.

    Attributes:
        head: the lines before the first hunk.
        hunks: its hunks.
    """

    head: tuple[str, ...]
    hunks: tuple[Hunk, ...]

    @property
    def path(self) -> str:
        """The file after the patch; empty for one that is removed, or that has no hunks."""
        names = [line[4:].split("\t")[0].strip() for line in self.head if line.startswith("+++ ")]
        return names[-1].removeprefix("b/") if names and names[-1] != "/dev/null" else ""

    @property
    def is_new(self) -> bool:
        """Whether the patch makes the file."""
        return any(line.startswith("--- /dev/null") for line in self.head)

    def with_hunk(self, number: int, lines: tuple[str, ...]) -> FilePatch:
        """Return it with other lines in one hunk."""
        hunks = list(self.hunks)
        hunks[number] = replace(hunks[number], lines=lines)
        return replace(self, hunks=tuple(hunks))


def read_patch(patch: str) -> tuple[FilePatch, ...]:
    """Read a unified diff, as git writes it or without git's own lines."""
    lines, files, at = _LINES.findall(patch), list[FilePatch](), 0
    head: list[str] = []
    while at < len(lines):
        match = _HUNK.fullmatch(lines[at])
        if match is None:
            head.append(lines[at])
            at += 1
            continue
        end = _end_of_hunk(lines, at + 1, int(match[2] or 1), int(match[4] or 1))
        hunk = Hunk(int(match[1]), match[5], tuple(lines[at + 1 : end]))
        if head:
            files.append(FilePatch(tuple(head), (hunk,)))
            head = []
        else:
            files[-1] = replace(files[-1], hunks=(*files[-1].hunks, hunk))
        at = end
    return tuple(files)


def _end_of_hunk(lines: list[str], at: int, old: int, new: int) -> int:
    while old > 0 or new > 0:
        if lines[at] == "\n":  # a context line whose space an editor took
            lines[at] = " \n"
        old -= lines[at][0] in " -"
        new -= lines[at][0] in " +"
        at += 1
    return at + 1 if at < len(lines) and lines[at].startswith("\\") else at


def write_patch(files: tuple[FilePatch, ...]) -> str:
    """Write a patch; hunks and files without a change are left out."""
    text: list[str] = []
    for file in files:
        hunks = [hunk for hunk in file.hunks if hunk.changes]
        moved = 0
        if hunks:
            text += file.head
        for hunk in hunks:
            old, new = hunk.count(" -"), hunk.count(" +")
            # a side without lines is numbered by the line before it
            start = hunk.start + moved + (not old) - (not new)
            text += [f"@@ -{hunk.start},{old} +{start},{new} @@{hunk.tail}", *hunk.lines]
            moved += new - old
    return "".join(text)


_TURNED = {"-": "+", "+": "-", "--- a/": "+++ b/", "+++ b/": "--- a/", "--- /": "+++ /", "+++ /": "--- /"}
_TURNED |= {"new file mode": "deleted file mode", "deleted file mode": "new file mode"}


def reversed_patch(patch: str) -> str:
    """Return the patch that undoes another one, of text files that keep their names."""
    return write_patch(tuple(map(_reversed_file, read_patch(patch))))


def _reversed_file(file: FilePatch) -> FilePatch:
    head = [_turned(line) for line in file.head if not line.startswith("index ")]
    names = [line for line in head if line.startswith(("--- ", "+++ "))]
    moved, hunks = 0, []
    for hunk in file.hunks:
        old, new = hunk.count(" -"), hunk.count(" +")
        hunks.append(Hunk(hunk.start + moved + (not old) - (not new), hunk.tail, tuple(_reversed_lines(hunk.lines))))
        moved += new - old
    return FilePatch((*(line for line in head if line not in names), *sorted(names, reverse=True)), tuple(hunks))


def _reversed_lines(lines: tuple[str, ...]) -> Iterator[str]:
    """Yield a hunk's lines under the other signs, with those that are removed first, as git writes them."""
    sides: dict[str, list[str]] = {"-": [], "+": []}
    sign = " "
    for line in lines:
        sign = sign if line[0] == "\\" else line[0]
        if sign == " ":
            yield from (*sides["-"], *sides["+"], line)
            sides = {"-": [], "+": []}
        else:
            sides[_TURNED[sign]].append(_turned(line))
    yield from (*sides["-"], *sides["+"])


def _turned(line: str) -> str:
    start = next((start for start in reversed(_TURNED) if line.startswith(start)), "")
    return _TURNED.get(start, "") + line.removeprefix(start)
