"""Run directories: ``run.json`` and one trajectory file per rollout, each written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import types
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from minisandbox import __version__
from minisandbox.errors import DiskFull, RunError
from minisandbox.store.durable import write_atomic
from minisandbox.store.faults import FULL
from minisandbox.store.locks import try_flock
from minisandbox.trajectories import Trajectory

VERSION = 1
"""Of the directory's layout."""

Config = Mapping[str, str | int | float | bool | None]

_FORMAT = "minisandbox-run"
_MAY_CHANGE = frozenset({"workers", "attempts", "tasks"})
"""A resumed run may be wider, longer, or about other tasks; anything else would mix what cannot be compared."""

_LONGEST_NAME = 180


class RunDirectory:
    """A run on disk, held by one process. Make one with :meth:`open`, and use it in a ``with`` block.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path, config: Config) -> RunDirectory:
        """Begin a run, or go on with one.

        Args:
            path: the directory; made if it is not there.
            config: the resolved configuration.

        Raises:
            RunError: another process is at it, a newer MiniSandbox made it, or its configuration is another.
            DiskFull: the disk is full.
            OSError: the directory cannot be made or written.
        """
        (path / "trajectories").mkdir(parents=True, exist_ok=True)
        run = cls(path, _locked(path))
        try:
            run._check(config)
            run._sweep()
        except BaseException:  # Ctrl-C included: the lock must not outlive the attempt
            run.close()
            raise
        return run

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
        _write(path, trajectory.to_text().encode("ascii"))
        return path

    def close(self) -> None:
        """Let others use the directory; calling it again does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        """Use the directory in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Let others use the directory."""
        self.close()

    def _check(self, config: Config) -> None:
        file = self.path / "run.json"
        try:
            known = _known_config(file)
        except FileNotFoundError:
            began = datetime.now(UTC).isoformat(timespec="seconds")
            head = {"format": _FORMAT, "version": VERSION, "minisandbox": __version__, "started": began}
            _write(file, json.dumps({**head, "config": dict(config)}, indent=1).encode() + b"\n")
            return
        for key in sorted((set(known) | set(config)) - _MAY_CHANGE):
            if known.get(key) != config.get(key):
                raise RunError(
                    f"{self.path} belongs to a run with {key} = {known.get(key)!r}, not {config.get(key)!r}",
                    hint="give the same options to go on with it, or another directory",
                )

    def _sweep(self) -> None:
        """Remove what a killed process left half-written."""
        for leftover in (*self.path.glob(".run.json.*"), *(self.path / "trajectories").glob(".*.json.*")):
            leftover.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if try_flock(lock):
        return lock
    os.close(lock)
    raise RunError(
        f"{path} is in use", reason="another process writes to this run", hint="wait for it, or give another directory"
    )


def _known_config(file: Path) -> dict[str, object]:
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is damaged", reason=str(error), hint="give another directory") from error
    version = run.get("version") if isinstance(run, dict) and run.get("format") == _FORMAT else None
    if not isinstance(version, int) or not isinstance(run.get("config"), dict):
        raise RunError(f"{file} does not describe a run", hint="give another directory")
    if version > VERSION:
        raise RunError(
            f"{file} has version {version}; this MiniSandbox knows up to {VERSION}",
            reason="a newer MiniSandbox made it",
            hint="update MiniSandbox, or give another directory",
        )
    return dict(run["config"])


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(
                f"cannot write {path}: the disk is full",
                reason=str(error),
                hint="free some space and give the same command again: finished rollouts are kept",
            ) from error
        raise
