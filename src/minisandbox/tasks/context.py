"""Settings of the conversion from dataset rows to tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue

ENVIRONMENTS = ("auto", "pins", "image")
"""How to build an image: from pins, from the dataset's own image, or (``auto``) from exact pins if there are any."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Settings of the conversion from dataset rows to tasks.

    Attributes:
        base: the directory for relative paths in rows; None: the current directory.
        pins: exported environments of the datasets' official images, or None.
        repo_mirrors: a directory of git repositories that are tried before the network, or None.
        environment: how to build rows whose data set publishes images: a name in :data:`ENVIRONMENTS`.
        places: the directories that may contain the host paths in rows; None: any directory.
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
