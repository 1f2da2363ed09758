"""Paths of this machine that rows name: those of a file that came from elsewhere must not have any directory copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

_HINT = (
    "put it there; or, where you trust all rows, --allow-local-sources (allow_local_sources=True in Python) lets them "
    "name any directory that you can read"
)
_FILE = "file:"


def problem_of(path: Path, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Why a row may not name a path, as what is wrong with it, the reason, and what to do; None where it may.

    Links are followed, and so is ``..``.

    Args:
        path: a relative one starts at the current directory, ``~`` is the home directory.
        places: directories that it must lie in; None: it may lie anywhere.
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


def local_repository(url: str) -> Path | None:
    """The path that a git repository's address stands for; None where it is an address of another machine."""
    if url.lower().startswith(_FILE):
        return Path(unquote(url[len(_FILE) :].removeprefix("//").removeprefix("localhost")))
    path = Path(url)
    try:
        there = path.expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        there = False
    if there or ("://" not in url and ":" not in url.partition("/")[0]):  # else [user@]host:path (git-fetch(1))
        return path
    return None
