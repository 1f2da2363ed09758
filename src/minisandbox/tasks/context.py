"""Configure the conversion of dataset rows to tasks, and check the host paths that rows name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue

ENVIRONMENTS = ("auto", "pins", "image")
"""How to build an image: from pins, from the dataset's own image, or (``auto``) from exact pins if there are any."""

_HINT = (
    "put it there; or, where you trust all rows, --allow-local-sources (allow_local_sources=True in Python) lets them "
    "name any directory that you can read"
)
_OF_A_SERVER = re.compile(
    r"(?!file:)(?:(?:https?|ssh|git)://[^/-].*|(?:[\w.-]+@)?[a-z0-9][\w.-]*:(?!//).+)", re.ASCII | re.IGNORECASE
)
"""Repository addresses that git never reads as a local path: URLs of servers, and ``host:path`` for ssh."""
_SERVERS = (
    "give one (https://HOST/PATH, ssh://HOST/PATH, HOST:PATH), and the repository to --repo-mirrors; or, where you "
    "trust all rows, --allow-local-sources (allow_local_sources=True in Python)"
)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Settings of the conversion from dataset rows to tasks.

    Attributes:
        base: the directory for relative paths in rows; None: the current directory.
        pins: exported environments of the datasets' official images, or None.
        repo_mirrors: a directory of git repositories that are tried before the network, or None.
        environment: how to build rows whose data set publishes images: a name in :data:`ENVIRONMENTS`.
        places: the directories that the host paths in rows must be in; None allows any directory.
        public_network: whether to grant the public network to tasks that request it.
    """

    base: Path | None = None
    pins: Path | None = None
    repo_mirrors: Path | None = None
    places: tuple[Path, ...] | None = None
    environment: str = "auto"
    public_network: bool = False

    def __post_init__(self) -> None:
        """Check the environment."""
        if self.environment not in ENVIRONMENTS:
            raise InvalidValue(f"environment is {self.environment!r}", hint=f"write one of {', '.join(ENVIRONMENTS)}")


def problem_of(path: Path, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Return why a row must not name this path, as (problem, reason, hint), or None if it may.

    Symbolic links and ``..`` are resolved.

    Args:
        path: the path, relative to the current directory; ``~`` is the home directory.
        places: the allowed directories; None allows every directory.
    """
    if places is None:
        return None
    try:
        real = path.expanduser().resolve()
        within = any(real.is_relative_to(directory.resolve()) for directory in places)
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
    allowed = ", ".join(str(directory.absolute()) for directory in places)
    return f"is {str(real)!r}, outside of {allowed}", "rows of a file may name only what lies in its directory", _HINT


def address_problem(url: str, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
    """Return why a row must not name this repository address, as (problem, reason, hint), or None if it may.

    Local repositories are forbidden unless ``places`` is None. Git follows references from one repository to another
    (links, alternates, ``gitdir:``), so a row could read any local repository of which its author knows a commit.
    """
    if places is None or _OF_A_SERVER.fullmatch(url):
        return None
    return (
        "is no address of a server",
        "rows that come from elsewhere may name no repository of this machine: git would read others through it",
        _SERVERS,
    )
