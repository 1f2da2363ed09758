"""Find the runs that the pages show, and name them in URLs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import NotFound
from minisandbox.rollouts.database import NAME
from minisandbox.view.index import RunIndex

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEPTH = 4
"""Levels of directories below a given path in which runs are searched."""
_PARTS = ("rollouts", "evaluation", "train", "eval")
"""Directories of a training run that are runs themselves; their names say too little."""
_SKIPPED = frozenset({"node_modules", "site-packages", "checkpoints", "model"})


class Run:
    """A run that the pages show.

    Attributes:
        key: the run's name in URLs.
        path: the run's directory.
    """

    def __init__(self, key: str, path: Path) -> None:
        self.key, self.path = key, path

    @cached_property
    def index(self) -> RunIndex:
        """The run's database; opened when a page needs it first."""
        return RunIndex(self.path / NAME, readonly=True)

    @property
    def training(self) -> Path | None:
        """The directory of the training run that this run belongs to, if any."""
        return next((path for path in self.path.parents[:2] if (path / "log.jsonl").is_file()), None)

    @property
    def config(self) -> dict[str, object]:
        """The configuration with which the run was started; empty if it is unknown."""
        try:
            document = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        config = document.get("config") if isinstance(document, dict) else None
        return config if isinstance(config, dict) else {}

    @property
    def expected(self) -> int:
        """The number of rollouts that the run is to have; 0 if it is unknown."""
        number = self.config.get("rollouts")
        return number if isinstance(number, int) else 0

    def state(self) -> tuple[int, ...]:
        """Return numbers that differ after every change of the database, without opening it."""
        files = [self.path / name for name in (NAME, f"{NAME}-wal")]
        return tuple(number for file in files if file.exists() for number in _stamp(file))


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


class Site:
    """The runs below some paths.

    Args:
        paths: directories of runs, or directories that contain runs.
        tokenizer: decodes the tokens of rollouts; None shows their ids.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.tokenizer = tokenizer
        self._paths = paths
        self._runs: dict[str, Run] = {}

    def runs(self) -> list[Run]:
        """Return all runs, including those that began after the last call."""
        listed = {run.path for run in self._runs.values()}
        for path in (run for base in self._paths for run in find_runs(base)):
            if path not in listed:
                key = self._key(path)
                self._runs[key] = Run(key, path)
                listed.add(path)
        return [run for run in self._runs.values() if (run.path / NAME).is_file()]

    def run(self, key: str) -> Run:
        """Return a run by its name in URLs.

        Raises:
            NotFound: there is no such run.
        """
        if key not in self._runs:
            self.runs()
        if key not in self._runs:
            raise NotFound(f"there is no run {key!r}", hint="the page of all runs lists their names")
        return self._runs[key]

    def _key(self, path: Path) -> str:
        parts = [path.name]
        for parent in path.parents[:2]:
            if parts[0] in _PARTS or parts[0].startswith("step-"):
                parts.insert(0, parent.name)
        name = key = ".".join(parts) or "run"
        count = 1
        while key in self._runs:
            count += 1
            key = f"{name}~{count}"
        return key


def find_runs(path: Path) -> Iterator[Path]:
    """Yield the run directories at or below a path, by name.

    Args:
        path: a directory; symbolic links below it are not followed.
    """
    yield from _search(path.absolute(), _DEPTH)


def _search(path: Path, depth: int) -> Iterator[Path]:
    if (path / NAME).is_file():
        yield path
        return
    if not depth:
        return
    try:
        children = sorted(child for child in path.iterdir() if child.is_dir() and not child.is_symlink())
    except OSError:
        return
    for child in children:
        if not child.name.startswith(".") and child.name not in _SKIPPED:
            yield from _search(child, depth - 1)
