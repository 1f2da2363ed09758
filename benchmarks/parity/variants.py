"""Broken variants of a task's reference, made mechanically: each row gets the same ones every time."""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Callable
from dataclasses import replace

from benchmarks.parity.diffs import FilePatch, Hunk, read_patch, reversed_patch, write_patch

from minisandbox.tasks import Task

RAISE = 'raise ImportError("broken on purpose")\n'
_CONTEXT = 3

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_TEXT = re.compile(r"""(["'])[^"'\\]+\1""")
_NAME = re.compile(r"(?<![\w'\"])[A-Za-z_]\w*")
_OPERATOR = re.compile(r"==|!=|<=|>=| < | > | \+ | - |\band\b|\bor\b|\bnot in\b|\bis not\b|\bTrue\b|\bFalse\b")
_OPPOSITES = {
    "==": "!=", "<=": ">", ">=": "<", " < ": " >= ", " > ": " <= ", " + ": " - ", "and": "or", "True": "False",
    "not in": "in", "is not": "is",
}  # fmt: skip
_OPPOSITE = {**{new: old for old, new in _OPPOSITES.items()}, **_OPPOSITES}
_EDITS: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (_NUMBER, lambda number: str(int(number) + 1)),
    (_TEXT, lambda text: f"{text[:-1]} changed{text[-1]}"),
    (_OPERATOR, lambda operator: _OPPOSITE[operator]),
    (_NAME, lambda name: f"{name}_changed"),
)


def reference_patch(task: Task) -> str:
    """Return the patch that solves a task, to be applied forwards."""
    reference = task.reference
    return reversed_patch(reference.patch) if reference.reverse else reference.patch


def without_the_end(patch: str) -> str:
    """Return a patch without its last hunk of code, or with a single one without its last added line.

    A hunk that adds nothing keeps the last line that it would remove.
    """
    files = read_patch(patch)
    places = _places(files)
    file, number = places[-1]
    lines = files[file].hunks[number].lines
    if len(places) > 1:
        return write_patch(_with(files, file, number, ()))
    sign = "+" if any(line[0] == "+" for line in lines) else "-"
    last = max(at for at, line in enumerate(lines) if line[0] == sign)
    kept = () if sign == "+" else (" " + lines[last][1:],)
    return write_patch(_with(files, file, number, (*lines[:last], *kept, *lines[last + 1 :])))


def with_a_change(patch: str, seed: str) -> str:
    """Return a patch in which one literal, operator or name of one added line is another.

    Where nothing is added, a line that is removed comes back changed.

    Args:
        patch: the patch.
        seed: decides which; the same one always decides the same.
    """
    files = read_patch(patch)
    chance = random.Random(seed)
    for sign in "+-":
        lines = [
            (file, number, at)
            for file, number in _places(files)
            for at, line in enumerate(files[file].hunks[number].lines)
            if line[0] == sign and not line[1:].lstrip().startswith("#")
        ]
        for file, number, at in chance.sample(lines, len(lines)):
            old = files[file].hunks[number].lines
            new = changed(old[at][1:], chance)
            if new is not None:
                kept = (old[at],) if sign == "-" else ()
                return write_patch(_with(files, file, number, (*old[:at], *kept, "+" + new, *old[at + 1 :])))
    raise ValueError("no line of the patch has anything to change")


def changed(line: str, chance: random.Random) -> str | None:
    """Return a line of Python in which one thing is another, or None where there is nothing to change."""
    kinds = [
        (found, edit)
        for pattern, edit in _EDITS
        if (found := [one for one in pattern.finditer(line) if not keyword.iskeyword(one[0]) or pattern is _OPERATOR])
    ]
    if not kinds:
        return None
    matches, edit = chance.choice(kinds)
    match = chance.choice(matches)
    return line[: match.start()] + edit(match[0]) + line[match.end() :]


def touched_module(patch: str) -> tuple[str, bool]:
    """Return the module that :func:`unimportable` breaks, and whether the patch makes it."""
    files = read_patch(patch)
    file = files[_places(files)[0][0]]
    return file.path, file.is_new


def unimportable(patch: str, top: str) -> str:
    """Return a patch that also makes the first module it touches raise at once.

    Args:
        patch: the patch.
        top: that module before the patch, at least its first three lines; empty for one that the patch makes.
    """
    files = read_patch(patch)
    index = _places(files)[0][0]
    file = files[index]
    first = file.hunks[0]
    above = tuple(" " + line for line in top.splitlines(keepends=True)[:_CONTEXT])
    if file.is_new:
        hunks = (replace(first, lines=("+" + RAISE, *first.lines)), *file.hunks[1:])
    elif first.start <= _CONTEXT + 1:  # it begins within or right below the context of the new one
        joined = Hunk(1, first.tail, ("+" + RAISE, *above[: first.start - 1], *first.lines))
        hunks = (joined, *file.hunks[1:])
    else:
        hunks = (Hunk(1, "\n", ("+" + RAISE, *above)), *file.hunks)
    return write_patch((*files[:index], replace(file, hunks=hunks), *files[index + 1 :]))


def _places(files: tuple[FilePatch, ...]) -> list[tuple[int, int]]:
    """The hunks of code: of Python files that are no tests; where there are none, of any file that stays."""
    code = [at for at, file in enumerate(files) if file.path.endswith(".py") and not _is_test(file.path)]
    chosen = code or [at for at, file in enumerate(files) if file.path]
    return [(at, number) for at in chosen for number, hunk in enumerate(files[at].hunks) if hunk.changes]


def _is_test(path: str) -> bool:
    parts = path.split("/")
    return bool({"test", "tests", "testing"} & set(parts[:-1])) or parts[-1].startswith("test_")


def _with(files: tuple[FilePatch, ...], file: int, number: int, lines: tuple[str, ...]) -> tuple[FilePatch, ...]:
    return (*files[:file], files[file].with_hunk(number, lines), *files[file + 1 :])
