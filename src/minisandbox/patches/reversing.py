"""A patch turned round: what undoes it, as a patch of its own."""

from __future__ import annotations

import re

from minisandbox.errors import PatchError
from minisandbox.patches.parsing import parse_patch

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_PAIRS = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}


def reversed_patch(patch: str, *, name: str = "the patch") -> str:
    """Return the patch that undoes another one.

    Args:
        patch: a unified diff, as for :func:`parse_patch`.
        name: what errors call it.

    Raises:
        PatchError: it is malformed or unsafe, or has a change that only git itself can turn round: of a binary file, or
            a copy.
    """
    for change in parse_patch(patch, name=name):
        if change.binary:
            raise PatchError(f"{name}: the binary change of {change.path} cannot be turned round", hint=_HINT)
    return "".join(_Reverser(_lines(patch), name).run())


_HINT = "make the reversed patch with `git diff -R`, and say that patch is the fix"


def _lines(patch: str) -> list[str]:
    """The lines, parted by line feeds alone: a carriage return and a form feed belong to their line."""
    return re.findall(r"[^\n]*\n|[^\n]+\Z", patch)


class _Reverser:
    """Goes through a patch once, and gives out each line turned round."""

    def __init__(self, lines: list[str], name: str) -> None:
        self.lines = lines
        self.name = name
        self.at = 0

    def run(self) -> list[str]:
        done: list[str] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if hunk := _HUNK.fullmatch(line):
                done += self._hunk(hunk)
            elif line.startswith("--- ") and self._next().startswith("+++ "):
                done += [_side("--- ", "a", self._next()), _side("+++ ", "b", line)]
                self.at += 2
            else:
                done += self._header(line)
        return done

    def _next(self) -> str:
        return self.lines[self.at + 1] if self.at + 1 < len(self.lines) else ""

    def _header(self, line: str) -> list[str]:
        self.at += 1
        if line.startswith("copy "):
            raise PatchError(f"{self.name}: a copied file cannot be turned round", hint=_HINT)
        if line.startswith("diff --git "):
            return [self._git_line(line)]
        if match := re.fullmatch(r"index (\w+)\.\.(\w+)(.*)", line, re.DOTALL):
            return [f"index {match[2]}..{match[1]}{match[3]}"]
        for start, other in _PAIRS.items():
            if line.startswith(start):
                return self._pair(line, start, other)
        return [line]

    def _pair(self, line: str, start: str, other: str) -> list[str]:
        """Turn one line of two round, or both at once, so that they keep their order."""
        following = self.lines[self.at] if self.at < len(self.lines) else ""
        if start.startswith(("old", "rename from")) and following.startswith(other):
            self.at += 1
            return [start + following.removeprefix(other), other + line.removeprefix(start)]
        return [other + line.removeprefix(start)]

    def _git_line(self, line: str) -> str:
        """Names of renamed files change places; otherwise both are the same."""
        old = new = None
        for header in self.lines[self.at : self.at + 6]:
            if header.startswith(("diff --git ", "@@ ")):
                break
            if header.startswith("rename from "):
                old = header.removeprefix("rename from ").rstrip("\n")
            if header.startswith("rename to "):
                new = header.removeprefix("rename to ").rstrip("\n")
        return line if old is None or new is None else f"diff --git {_named('a', new)} {_named('b', old)}\n"

    def _hunk(self, hunk: re.Match[str]) -> list[str]:
        old, new = int(hunk[2] or 1), int(hunk[4] or 1)
        before = hunk[1] + ("" if hunk[2] is None else f",{hunk[2]}")
        after = hunk[3] + ("" if hunk[4] is None else f",{hunk[4]}")
        done = [f"@@ -{after} +{before} @@{hunk[5]}"]
        self.at += 1
        removed: list[str] = []  # of the reversed patch: lines that the patch adds
        added: list[str] = []
        kept = done
        while self.at < len(self.lines) and (old > 0 or new > 0 or self.lines[self.at].startswith("\\")):
            line = self.lines[self.at]
            self.at += 1
            if line.startswith("\\"):
                kept.append(line)
            elif line.startswith("+"):
                new, kept = new - 1, removed
                removed.append("-" + line[1:])
            elif line.startswith("-"):
                old, kept = old - 1, added
                added.append("+" + line[1:])
            else:
                old, new = old - 1, new - 1
                done += [*removed, *added, line]
                removed, added, kept = [], [], done
        return [*done, *removed, *added]


def _side(sign: str, prefix: str, line: str) -> str:
    """The name of a ``---`` or ``+++`` line under the other sign."""
    name = line[4:]
    if name.startswith('"'):
        return sign + re.sub(r'^"[abciow]/', f'"{prefix}/', name)
    return sign + re.sub(r"^[abciow]/", f"{prefix}/", name)


def _named(prefix: str, path: str) -> str:
    return f'"{prefix}/{path[1:]}' if path.startswith('"') else f"{prefix}/{path}"
