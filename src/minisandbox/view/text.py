"""Make text of agents and repositories harmless and short enough to show: escape, cut, and split into lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LINES = 200
"""Lines of a text that a page shows, half of them from its end; the whole text is behind a link."""
WIDTH = 2000
"""Characters of a line that a page shows."""

# Control characters, unpaired surrogates, and what changes the direction of text, breaks lines, or is invisible.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def visible(text: str) -> str:
    r"""Replace control, bidirectional and invisible characters by escapes such as ``\x1b`` and ``\u202e``."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The lines of a text that a page shows.

    Attributes:
        head: the first lines.
        tail: the last lines; empty if nothing is left out.
        hidden: the number of lines between ``head`` and ``tail``.
        is_cut: whether lines or parts of lines are left out.
    """

    head: str
    tail: str = ""
    hidden: int = 0
    is_cut: bool = False


def excerpt(text: str | bytes, lines: int = LINES) -> Excerpt:
    """Return the first and last lines of a text, without the ends of very long lines.

    Args:
        text: the text; bytes are decoded as UTF-8.
        lines: the number of lines to show.
    """
    text = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text
    rows = text.rstrip("\n").split("\n")
    hidden = max(0, len(rows) - lines)
    half = lines // 2 if hidden else len(rows)
    head, tail = rows[:half], rows[half + hidden :]
    is_cut = bool(hidden) or any(len(row) > WIDTH for row in rows)
    return Excerpt(_joined(head), _joined(tail), hidden, is_cut)


def _joined(rows: Iterable[str]) -> str:
    return "\n".join(row if len(row) <= WIDTH else f"{row[:WIDTH]} [... {len(row) - WIDTH} characters]" for row in rows)


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line of a patch.

    Attributes:
        kind: ``file``, ``hunk``, ``added``, ``removed`` or ``context``.
        text: the line.
        is_new: whether the line is not part of the patch before.
    """

    kind: str
    text: str
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Diff:
    """A patch as a page shows it.

    Attributes:
        lines: its lines, without those after the limit.
        added: the number of added lines.
        removed: the number of removed lines.
        hidden: the number of lines that are not shown.
    """

    lines: tuple[DiffLine, ...]
    added: int
    removed: int
    hidden: int


def diff_of(patch: bytes, before: bytes | None = None, limit: int = 1000) -> Diff:
    """Split a patch into lines, and mark those that an earlier patch does not have.

    Args:
        patch: a git patch.
        before: the earlier patch; None marks no line.
        limit: the number of lines to show.
    """
    rows = patch.decode("utf-8", "backslashreplace").splitlines()
    earlier = None if before is None else set(before.decode("utf-8", "backslashreplace").splitlines())
    kinds = [_kind(row) for row in rows]
    lines = tuple(
        DiffLine(kind, _joined([row]), earlier is not None and kind in ("added", "removed") and row not in earlier)
        for kind, row in zip(kinds[:limit], rows, strict=False)
    )
    return Diff(lines, kinds.count("added"), kinds.count("removed"), max(0, len(rows) - limit))


def _kind(line: str) -> str:
    if line.startswith(("diff ", "index ", "--- ", "+++ ", "new file", "deleted file", "rename ", "similarity ")):
        return "file"
    return {"@": "hunk", "+": "added", "-": "removed"}.get(line[:1], "context")
