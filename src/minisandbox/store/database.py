"""Databases of runs: SQLite files in run directories, one transaction per finished piece of work."""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

from minisandbox.errors import RunError
from minisandbox.store.rundir import disk_full

_WAIT = 30.0


class Database:
    """A SQLite file of a run. Subclasses say what is in it.

    Args:
        path: the database's file, made if it is not there; None for one in memory.
        wait: seconds to wait for another process that has it locked.
        readonly: whether it is only looked at; then it has to be there.

    Raises:
        RunError: the file is no such database, damaged, or of a newer version.
        DiskFull: the disk is full.
        OSError: the database cannot be created.
    """

    tables: ClassVar[str] = ""
    """The statements that make its tables if they are not there."""
    version: ClassVar[int] = 1
    """Of the tables."""

    def __init__(self, path: Path | None, *, wait: float = _WAIT, readonly: bool = False) -> None:
        self._path = path or Path(":memory:")
        with self._faults():
            # one thread at a time uses the connection, but not always the same
            self._database = _connect(path, wait, readonly)
            try:
                self.journal = "" if readonly else _journal(self._database)
                """How a transaction is made durable: ``wal``; ``delete`` if the file system cannot do that (NFS)."""
                self._prepare(readonly)
            except BaseException:  # Ctrl-C included: the file must not stay open
                self._database.close()
                raise
        if path is not None and self.journal == "delete":
            what = f"{path.parent}: this file system has no shared memory, so SQLite uses a rollback journal"
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        self._database.close()

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _prepare(self, readonly: bool) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version > self.version:
            raise RunError(
                f"{self._path} has version {version}; this MiniSandbox knows up to {self.version}",
                reason="a newer MiniSandbox made it",
                hint="update MiniSandbox, or give another directory",
            )
        if not readonly:
            self._database.execute(self.tables)
            self._database.execute(f"PRAGMA user_version = {self.version}")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise disk_full(self._path, error) from error
            busy = code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise RunError(
                f"{self._path} cannot be used",
                reason=f"SQLite says: {error}",
                hint="end the program that has it open, and give the same command again: what is finished is kept"
                if busy
                else "check who owns the directory and its disk; where the file is damaged, give another directory",
            ) from error


def _connect(path: Path | None, wait: float, readonly: bool) -> sqlite3.Connection:
    """Open a file.

    A reader takes part in the locking if it can: while a run is written, ``immutable`` would show it rows that are
    stale or half written. A directory that cannot be written has no place for the files that readers share, if a writer
    has not created them there; then ``immutable`` is right (sqlite.org/wal.html#read_only_databases).
    """
    uri = "file::memory:" if path is None else path.absolute().as_uri()

    def opened(mode: str) -> sqlite3.Connection:
        return sqlite3.connect(f"{uri}{mode}", timeout=wait, isolation_level=None, check_same_thread=False, uri=True)

    connection = opened("?mode=ro" if readonly else "")
    if readonly and path is not None:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            connection.close()
            if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
                raise
            connection = opened("?immutable=1")
    return connection


def _journal(database: sqlite3.Connection) -> str:
    """Choose the journal: write-ahead if the file system can do it, with a fall-back if it cannot.

    On network file systems WAL has no shared memory (sqlite.org/wal.html): SQLite refuses, or fails at the first read.
    ``MINISANDBOX_NO_WAL=1`` is for those where it only seems to work.
    """
    modes = ("delete",) if os.environ.get("MINISANDBOX_NO_WAL") == "1" else ("wal", "delete")
    chosen = ""
    for mode in modes:
        try:
            (chosen,) = database.execute(f"PRAGMA journal_mode = {mode}").fetchone()
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            continue
        if chosen == mode:
            break
    database.execute("PRAGMA synchronous = FULL")
    return str(chosen)
