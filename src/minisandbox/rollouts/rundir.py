"""Run directories of rollouts: one trajectory file per rollout, each written whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from minisandbox.store import rundir
from minisandbox.store.rundir import VERSION, Config, write_whole
from minisandbox.trajectories import Trajectory

__all__ = ["VERSION", "Config", "RunDirectory"]

_LONGEST_NAME = 180


class RunDirectory(rundir.RunDirectory):
    """A run on disk, held by one process. Make one with :meth:`open`, and use it in a ``with`` block.

    Attributes:
        path: the directory.
    """

    folders = ("trajectories",)
    may_change = frozenset({"workers", "attempts", "tasks"})

    def file_of(self, instance_id: str, attempt: int) -> Path:
        """Return where a rollout's trajectory lies: named after the task, or its hash where that name is too long."""
        name = instance_id
        if len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            name = f"{name[:40]}-{digest}"
        return self.path / "trajectories" / f"{name}__{attempt}.json"

    def load(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's trajectory, or None where there is none.

        Raises:
            TrajectoryError: there is one, and it cannot be read.
        """
        try:
            return Trajectory.load(self.file_of(instance_id, attempt))
        except FileNotFoundError:
            return None

    def write(self, trajectory: Trajectory) -> Path:
        """Write a trajectory, durably; returns its file. Threads may call it at once.

        Raises:
            DiskFull: the disk is full; what was there is still there.
            OSError: it cannot be written.
        """
        path = self.file_of(trajectory.instance_id, trajectory.attempt)
        write_whole(path, trajectory.to_text().encode("ascii"))
        return path
