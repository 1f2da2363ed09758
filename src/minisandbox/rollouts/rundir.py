"""Run directories of rollouts: a database that one process writes, and any process reads."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from minisandbox.errors import NotFound, RunError
from minisandbox.rollouts.database import NAME, Packed, RolloutDatabase, pack
from minisandbox.rollouts.summary import Summary
from minisandbox.store import rundir
from minisandbox.store.rundir import VERSION, Config
from minisandbox.trajectories import Trajectory

__all__ = ["VERSION", "Config", "RunDirectory", "RunReader"]

_OLD = "trajectories"
"""Where runs of version 0.1 kept a file for each rollout."""


class RunDirectory(rundir.RunDirectory):
    """A run on disk, held by one process. Make one with :meth:`open`, and use it in a ``with`` block.

    Attributes:
        path: the directory.
    """

    may_change = frozenset({"workers", "attempts", "tasks"})

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self._database: RolloutDatabase | None = None

    @property
    def journal(self) -> str:
        """How a transaction is made durable: ``wal``, or ``delete`` where the file system cannot do that."""
        return self._rollouts().journal

    def summaries(self) -> Iterator[Summary]:
        """Return what has ended, those of earlier processes included, by task and attempt.

        Raises:
            RunError: the database cannot be read.
            TrajectoryError: a file of an older run cannot be read.
        """
        return _merged(self._rollouts(), self.path)

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's record, or None where there is none.

        Raises:
            TrajectoryError: there is one, and it cannot be read.
        """
        return _found(self._rollouts(), self.path, instance_id, attempt)

    def write(self, trajectory: Trajectory) -> Summary:
        """Keep a rollout, durably, in one transaction; returns its summary. Threads may call it at once.

        Raises:
            DiskFull: the disk is full; what was there is still there.
            RunError: the database cannot be written.
        """
        return self.keep(pack(trajectory))

    def keep(self, packed: Packed) -> Summary:
        """As :meth:`write`, for what is packed already."""
        return self._rollouts().put(packed)

    def close(self) -> None:
        """Let others use the directory; calling it again does nothing."""
        if self._database is not None:
            self._database.close()
            self._database = None
        super().close()

    def _rollouts(self) -> RolloutDatabase:
        if self._database is None:
            if self._lock < 0:
                raise RunError(f"{self.path} is closed")
            self._database = RolloutDatabase(self.path / NAME)
        return self._database


def is_run(path: Path) -> bool:
    """Whether a path is the directory of a run."""
    return (path / NAME).is_file() or (path / _OLD).is_dir()


class RunReader:
    """A run that is only looked at, while it goes on or later. Use it in a ``with`` block.

    Attributes:
        path: the directory.

    Args:
        path: the run's directory.

    Raises:
        NotFound: there is no run.
        RunError: its database is damaged, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        if not is_run(path):
            raise NotFound(
                f"{path} is not the directory of a run",
                reason=f"it has no {NAME}",
                hint="give the directory that minisandbox rollout --out or train rl wrote: RUN/rollouts",
            )
        self.path = path
        self._database = RolloutDatabase(path / NAME, readonly=True) if (path / NAME).is_file() else None

    def summaries(self) -> Iterator[Summary]:
        """As :meth:`RunDirectory.summaries`."""
        return _merged(self._database, self.path)

    def patches(self) -> Iterator[tuple[str, int, bytes]]:
        """Return what was submitted, by task and attempt."""
        if self._database is not None:
            yield from self._database.patches()

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """As :meth:`RunDirectory.trajectory`."""
        return _found(self._database, self.path, instance_id, attempt)

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the database."""
        if self._database is not None:
            self._database.close()


def _merged(database: RolloutDatabase | None, path: Path) -> Iterator[Summary]:
    """What the database has, then what an older MiniSandbox left in files and nobody did again."""
    seen: set[tuple[str, int]] = set()
    for one in database.summaries() if database is not None else ():
        seen.add((one.instance_id, one.attempt))
        yield one
    for file in sorted((path / _OLD).glob("*.json")):
        if not file.name.startswith("."):
            one = Summary.of(Trajectory.load(file))
            if (one.instance_id, one.attempt) not in seen:
                yield one


def _found(database: RolloutDatabase | None, path: Path, instance_id: str, attempt: int) -> Trajectory | None:
    known = None if database is None else database.trajectory(instance_id, attempt)
    if known is not None:
        return known
    for file in (path / _OLD).glob(f"*__{attempt}.json"):
        if file.name.startswith(f"{instance_id[:40]}"):
            one = Trajectory.load(file)
            if one.instance_id == instance_id:
                return one
    return None
