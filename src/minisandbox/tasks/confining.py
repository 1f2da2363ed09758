"""Paths of this machine that rows name: those of a file that came from elsewhere must not have any directory copied."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

_HINT = (
    "put it there; or, where you trust all rows, --allow-local-sources (allow_local_sources=True in Python) lets them "
    "name any directory that you can read"
)
_FILE = "file:"
_PLAIN = ("file:///", "file://localhost/")

_ENDS = ("", "/.git", ".git", ".git/.git")
"""What git tries after the path of a repository (enter_repo in its path.c)."""
_POINTER = b"gitdir:"
_OF_OBJECTS = re.compile(
    r"[0-9a-f]{2}/[^/]+|pack/[^/]+\.(?:pack|idx|rev|bitmap|keep|mtimes|promisor)|pack/\.?tmp[-_][^/]*"
    r"|info/(?:packs|commit-graph|commit-graphs/[^/]+)"
)
"""Files of git that name no others: ``pack/multi-pack-index`` and what comes later may name packs elsewhere."""


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


def repository_problem(written: str, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Why a row may not name a repository of this machine, as :func:`problem_of` says it; None where it may.

    Its objects must lie in it, too: git follows what leads to those of another repository, of which whoever wrote the
    row then only needs to know a commit.

    Args:
        written: its path, as git gets it: behind ``project/.`` it looks at ``project/..git``.
        places: directories that it must lie in; None: it may lie anywhere.
    """
    if (problem := problem_of(Path(written), places)) is not None or places is None:
        return problem
    try:
        tried = [Path(f"{written.rstrip('/')}{end}") for end in _ENDS]
        there = [place for place in tried if os.path.lexists(place)]
        elsewhere = next((found for place in there if (found := _leads_out(place))), None)
    except OSError as error:
        return "cannot be read", str(error), _HINT
    if elsewhere is None:
        return next((problem for place in there if (problem := problem_of(place, places))), None)
    reason = f"{str(elsewhere)!r} leads elsewhere, and rows of a file may name only what lies in its directory"
    return (
        "is a repository of which a part lies elsewhere",
        reason,
        f"make a clone without links, alternates and other such files; {_HINT}",
    )


def _leads_out(place: Path) -> Path | None:
    """What of a repository's own files leads git to other places; None where nothing does, or this is no repository."""
    if place.name.endswith(".git") and place.is_symlink():
        return place
    if place.is_file():
        with place.open("rb") as file:
            return place if file.read(len(_POINTER)) == _POINTER else None  # else a bundle
    if not os.path.lexists(place / "HEAD"):
        return None
    if os.path.lexists(place / "commondir"):
        return place / "commondir"
    if not os.path.lexists(objects := place / "objects"):
        return None
    named = (file for file in _files(objects) if not _OF_OBJECTS.fullmatch(file.relative_to(objects).as_posix()))
    return next((link for link in _files(place) if link.is_symlink()), None) or next(named, None)


def _files(place: Path) -> Iterator[Path]:
    """All below a directory but directories."""
    for here, directories, files in os.walk(place, onerror=_raise):
        links = (name for name in directories if os.path.islink(os.path.join(here, name)))
        yield from (Path(here, name) for name in (*links, *files))


def _raise(error: OSError) -> None:
    raise error


def address_problem(url: str, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Why a row may not name a git repository by an address, as :func:`problem_of` says it; None where it may.

    One of this machine's is what its path says and nothing else: git drops what may be a host before it, up to the
    bracket behind the first ``@[`` wherever that is (``host_end`` in its connect.c).
    """
    if places is None or (path := local_repository(url)) is None:
        return None
    in_url = url.lower().startswith(_FILE)
    if "@[" in path or (in_url and not url.startswith(_PLAIN)):
        return (
            "is not the path that git would read",
            "git takes what stands before a path for the name of a host, and drops it",
            "write file:///path/of/the/repository, or the path alone, without '@['",
        )
    return repository_problem(path, places)


def local_repository(url: str) -> str | None:
    """The path that git is given for a repository's address; None where it is an address of another machine."""
    if url.lower().startswith(_FILE):
        rest = unquote(url[len(_FILE) :], errors="surrogateescape")
        return rest.removeprefix("//").removeprefix("localhost")
    if "://" in url:
        return None
    try:
        path = Path(url).expanduser().absolute()
        there = path.exists()
    except (OSError, RuntimeError, ValueError):
        path, there = Path(url), False
    return str(path) if there or ":" not in url.partition("/")[0] else None  # else [user@]host:path (git-fetch(1))
