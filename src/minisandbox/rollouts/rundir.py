"""Run directories of rollouts: a database that one process writes and any process reads."""

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
"""Directory in which runs of version 0.1 kept one file per rollout."""


class RunDirectory(rundir.RunDirectory):
    """A run on disk, locked by one process. Create it with :meth:`open`, and use it in a ``with`` block.

    Attributes:
        path: the directory.
    """

    may_change = frozenset({"workers", "attempts", "tasks"})

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self._database: RolloutDatabase | None = None

    def summaries(self) -> Iterator[Summary]:
        """Return the summaries of ended rollouts, including those of earlier processes, by task and attempt.

        Raises:
            RunError: the database cannot be read.
            TrajectoryError: a file of an older run cannot be read.
        """
        return _merged(self._rollouts(), self.path)

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's record, or None if there is no such rollout.

        Raises:
            TrajectoryError: the record cannot be read.
        """
        return _found(self._rollouts(), self.path, instance_id, attempt)

    def write(self, trajectory: Trajectory) -> Summary:
        """Store a rollout durably in one transaction, and return its summary. Thread-safe.

        Raises:
            DiskFull: the disk is full; earlier rollouts are kept.
            RunError: the database cannot be written.
        """
        return self.keep(pack(trajectory))

    def keep(self, packed: Packed) -> Summary:
        """Store a packed rollout, as :meth:`write` does."""
        return self._rollouts().put(packed)

    def close(self) -> None:
        """Release the directory; further calls do nothing."""
        if self._database is not None:
            self._database.close()
            self._database = None
        super().close()

    def _rollouts(self) -> RolloutDatabase:
        if self._database is None:
            if self._lock < 0:
                raise RunError(f"the run directory {self.path} is closed", hint="use it inside its with block")
            self._database = RolloutDatabase(self.path / NAME)
        return self._database


def is_run(path: Path) -> bool:
    """Return whether a path is a run's directory."""
    return (path / NAME).is_file() or (path / _OLD).is_dir()


class RunReader:
    """Reads a run, also while it is in progress. Use it in a ``with`` block.

    Attributes:
        path: the directory.

    Args:
        path: the run's directory.

    Raises:
        NotFound: the path is not a run.
        RunError: its database is damaged, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        if not is_run(path):
            raise NotFound(
                f"{path} is not a run's directory",
                reason=f"it has no {NAME}",
                hint="give the directory written by minisandbox rollout --out, or by train rl: RUN/rollouts",
            )
        self.path = path
        self._database = RolloutDatabase(path / NAME, readonly=True) if (path / NAME).is_file() else None

    def summaries(self) -> Iterator[Summary]:
        """Return the summaries of ended rollouts, as :meth:`RunDirectory.summaries`."""
        return _merged(self._database, self.path)

    def patches(self) -> Iterator[tuple[str, int, bytes]]:
        """Return all submissions, by task and attempt."""
        if self._database is not None:
            yield from self._database.patches()

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's record, as :meth:`RunDirectory.trajectory`."""
        return _found(self._database, self.path, instance_id, attempt)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield all rollouts' records, by task and attempt."""
        for one in list(self.summaries()):
            if (trajectory := self.trajectory(one.instance_id, one.attempt)) is not None:
                yield trajectory

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the database."""
        if self._database is not None:
            self._database.close()


def _merged(database: RolloutDatabase | None, path: Path) -> Iterator[Summary]:
    """Yield the database's rollouts, then those that an older version left in files and no later run replaced."""
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
