"""What rows of other datasets need besides themselves to become tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Directories that loading looks into.

    Attributes:
        base: where relative paths in rows start; None: the current directory.
        pins: exported environments of the datasets' official images, or None.
        repo_mirrors: git repositories that are looked in before the network is, or None.
        places: the directories in which paths of this machine that rows name must lie; None: they may lie anywhere.
    """

    base: Path | None = None
    pins: Path | None = None
    repo_mirrors: Path | None = None
    places: tuple[Path, ...] | None = None
