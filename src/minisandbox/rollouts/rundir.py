"""Run directories of rollouts, with a database that one process writes and any process may read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from minisandbox import runs
from minisandbox.errors import NotFound, RunError
from minisandbox.rollouts.database import NAME, Packed, RolloutDatabase, pack
from minisandbox.rollouts.summary import Summary
from minisandbox.trajectories import Trajectory


class RunDirectory(runs.RunDirectory):
    """A run directory, locked by one process. Create it with :meth:`open`, and use it in a ``with`` block.

    Attributes:
        path: the directory.
    """

    may_change = frozenset({"workers", "attempts", "tasks", "rollouts"})

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self._database: RolloutDatabase | None = None

    def summaries(self) -> Iterator[Summary]:
        """Return the summaries of all ended rollouts, including rollouts of earlier processes, by task and attempt.

        Raises:
            RunError: the database cannot be read.
        """
        return self._rollouts().summaries()

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's record, or None if there is no such rollout.

        Raises:
            TrajectoryError: the record cannot be read.
        """
        return self._rollouts().trajectory(instance_id, attempt)

    def write(self, trajectory: Trajectory) -> Summary:
        """Store a rollout durably in one transaction, and return its summary. Thread-safe.

        Raises:
            DiskFull: the disk is full; earlier rollouts are kept.
            RunError: the database cannot be written.
        """
        return self.keep(pack(trajectory))

    def keep(self, packed: Packed) -> Summary:
        """Store a packed rollout, with the same errors as :meth:`write`."""
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
    return (path / NAME).is_file()


class RunReader:
    """Read a run, even while it is in progress. Use the reader in a ``with`` block.

    Attributes:
        path: the directory.

    Args:
        path: the run's directory.

    Raises:
        NotFound: the path is not a run directory.
        RunError: the run's database is damaged, or has a newer version.
    """

    def __init__(self, path: Path) -> None:
        if not is_run(path):
            raise NotFound(
                f"{path} is not a run's directory",
                reason=f"it has no {NAME}",
                hint="give the directory written by minisandbox rollout --out, or by train rl: RUN/rollouts",
            )
        self.path = path
        self._database = RolloutDatabase(path / NAME, readonly=True)

    def summaries(self) -> Iterator[Summary]:
        """Return the summaries of ended rollouts, as in :meth:`RunDirectory.summaries`."""
        return self._database.summaries()

    def patches(self) -> Iterator[tuple[str, int, bytes]]:
        """Return the task id, attempt and submission of all rollouts with a submission, ordered by task and attempt."""
        return self._database.patches()

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's record, as in :meth:`RunDirectory.trajectory`."""
        return self._database.trajectory(instance_id, attempt)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield the records of all rollouts, ordered by task and attempt."""
        for summary in list(self.summaries()):
            if (trajectory := self.trajectory(summary.instance_id, summary.attempt)) is not None:
                yield trajectory

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
        self._database.close()
