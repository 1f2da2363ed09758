"""Checks of host paths in rows: a downloaded task file could otherwise copy any directory into an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_HINT = (
    "put it there; or, where you trust all rows, --allow-local-sources (allow_local_sources=True in Python) lets them "
    "name any directory that you can read"
)
_OF_A_SERVER = re.compile(
    r"(?!file:)(?:(?:https?|ssh|git)://[^/-].*|(?:[\w.-]+@)?[a-z0-9][\w.-]*:(?!//).+)", re.ASCII | re.IGNORECASE
)
"""What git takes for one, and nothing that it may take for a path: ``host:path`` is ssh's (git-fetch(1))."""
_SERVERS = (
    "give one (https://HOST/PATH, ssh://HOST/PATH, HOST:PATH), and the repository to --repo-mirrors; or, where you "
    "trust all rows, --allow-local-sources (allow_local_sources=True in Python)"
)


def problem_of(path: Path, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Return why a row may not name a path (problem, reason, hint), or None if it may.

    Symbolic links and ``..`` are resolved.

    Args:
        path: the path, relative to the current directory; ``~`` is the home directory.
        places: the allowed directories; None: any.
    """
    if places is None:
        return None
    try:
        real = path.expanduser().resolve()
        within = any(real.is_relative_to(place.resolve()) for place in places)
    except (OSError, RuntimeError, ValueError) as error:
        return "is not a path", str(error), "give the path of a directory"
    if within:
        return None
    if not places:
        return (
            "is a path of this machine",
            "rows that come from elsewhere have no file beside which it could lie",
            _HINT,
        )
    where = ", ".join(str(place.absolute()) for place in places)
    return f"is {str(real)!r}, outside of {where}", "rows of a file may name only what lies in its directory", _HINT


def address_problem(url: str, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Return why a row may not name a git repository's address, as :func:`problem_of`, or None if it may.

    Repositories of this machine are never allowed: git follows references between repositories (links, alternates,
    ``gitdir:``), so that a row could read any repository of which its author knows a commit.
    """
    if places is None or _OF_A_SERVER.fullmatch(url):
        return None
    return (
        "is no address of a server",
        "rows that come from elsewhere may name no repository of this machine: git would read others through it",
        _SERVERS,
    )
