"""Keep a run in a directory, so that a later process can resume the run. Only one process may use it at a time.

``run.json`` records the run's configuration. The process that works in the directory holds a lock on ``.lock``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Self

from minisandbox import __version__
from minisandbox.errors import DiskFull, RunError
from minisandbox.store.disk.durable import HALF_WRITTEN, write_atomic
from minisandbox.store.disk.faults import FULL
from minisandbox.store.disk.locks import LOCK_FILE, open_locked

VERSION = 1
"""Version of the directory's layout."""

Config = Mapping[str, str | int | float | bool | None]


class RunDirectory:
    """A run on disk, locked by one process. Create it with :meth:`open`, and use it in a ``with`` block.

    Attributes:
        path: the directory.
    """

    kind: ClassVar[str] = "minisandbox-run"
    """Name of this kind of run in ``run.json``."""
    folders: ClassVar[tuple[str, ...]] = ()
    """Subdirectories whose files are written atomically."""
    may_change: ClassVar[frozenset[str]] = frozenset({"workers", "tasks"})
    """Settings that may differ when a run resumes; any other difference would mix results that are not comparable."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path, config: Config) -> Self:
        """Start a run, or resume the run in the directory.

        Args:
            path: the directory, created if missing.
            config: the resolved configuration.

        Raises:
            RunError: another process has locked the run, a newer version created it, or its configuration differs.
            DiskFull: the disk is full.
            OSError: the directory cannot be created or written.
        """
        for directory in (path, *(path / folder for folder in cls.folders)):
            directory.mkdir(parents=True, exist_ok=True)
        run = cls(path, _locked(path))
        try:
            run._check(config)
            run._sweep()
        except BaseException:  # also on Ctrl-C, release the lock
            run.close()
            raise
        return run

    def close(self) -> None:
        """Release the directory's lock; closing again does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        """Use the directory in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the directory's lock."""
        self.close()

    def _check(self, config: Config) -> None:
        record_file = self.path / "run.json"
        try:
            recorded = _known_config(record_file, self.kind)
        except FileNotFoundError:
            start_time = datetime.now(UTC).isoformat(timespec="seconds")
            header = {"format": self.kind, "version": VERSION, "minisandbox": __version__, "started": start_time}
            write_whole(record_file, json.dumps({**header, "config": dict(config)}, indent=1).encode() + b"\n")
            return
        for key in sorted((set(recorded) | set(config)) - self.may_change):
            if recorded.get(key) != config.get(key):
                raise RunError(
                    f"{self.path} belongs to a run with {key} = {recorded.get(key)!r}, not {config.get(key)!r}",
                    hint="give the same options to go on with it, or another directory",
                )

    def _sweep(self) -> None:
        """Remove the half-written files of killed processes."""
        for directory in (self.path, *(self.path / folder for folder in self.folders)):
            for leftover in directory.glob(f".*.{HALF_WRITTEN}"):
                leftover.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of a run atomically and durably.

    Raises:
        DiskFull: the disk is full; the old content is unchanged.
        OSError: the file cannot be written.
    """
    try:
        write_atomic(path, content)
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(path, error) from error
        raise


def disk_full(path: Path, error: Exception) -> DiskFull:
    """Return the error for a run's file that could not be written because the disk is full."""
    return DiskFull(
        f"cannot write {path}: the disk is full",
        reason=str(error),
        hint="free some space and give the same command again: what is finished is kept",
    )


def _locked(path: Path) -> int:
    if (lock := open_locked(path / ".lock", LOCK_FILE)) is not None:
        return lock
    raise RunError(
        f"{path} is in use", reason="another process writes to this run", hint="wait for it, or give another directory"
    )


def _known_config(record_file: Path, kind: str) -> dict[str, object]:
    try:
        run = json.loads(record_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{record_file} is damaged", reason=str(error), hint="give another directory") from error
    recorded_kind = run.get("format") if isinstance(run, dict) else None
    version = run.get("version") if recorded_kind == kind else None
    if not isinstance(version, int) or not isinstance(run.get("config"), dict):
        reason = (
            f"it describes a {recorded_kind}, not a {kind}"
            if isinstance(recorded_kind, str) and recorded_kind != kind
            else None
        )
        raise RunError(f"{record_file} does not describe such a run", reason=reason, hint="give another directory")
    if version > VERSION:
        raise RunError(
            f"{record_file} has version {version}; this MiniSandbox knows up to {VERSION}",
            reason="a newer MiniSandbox made it",
            hint="update MiniSandbox, or give another directory",
        )
    return dict(run["config"])
