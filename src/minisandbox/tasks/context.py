"""What rows of other datasets need besides themselves to become tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue

ENVIRONMENTS = ("auto", "pins", "image")
"""What an image is made of: pins, the data set's own container image, or (``auto``) exact pins where there are any."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Directories that loading looks into.

    Attributes:
        base: where relative paths in rows start; None: the current directory.
        pins: exported environments of the datasets' official images, or None.
        repo_mirrors: git repositories that are looked in before the network is, or None.
        environment: how rows are built whose data set publishes images: a name in :data:`ENVIRONMENTS`.
        places: the directories in which paths of this machine that rows name must lie; None: they may lie anywhere.
        public_network: whether tasks that ask for the public network get it; without, they have none.
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
