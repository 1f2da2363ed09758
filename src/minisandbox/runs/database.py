"""Store a run's results in SQLite with durable transactions, also on network file systems."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Self

from minisandbox.errors import RunError
from minisandbox.runs.directory import disk_full

DATABASE = "results.sqlite"
"""File name of the results database in a run directory."""
_WAIT = 30.0
_RESULTS = """
CREATE TABLE IF NOT EXISTS results (
    id TEXT PRIMARY KEY,        -- whose result it is
    fingerprint TEXT NOT NULL,  -- of everything that it rests on
    final INTEGER NOT NULL,     -- 0: we failed, and do it again
    ended TEXT NOT NULL,        -- UTC, ISO 8601
    body TEXT NOT NULL          -- JSON
)
"""


class Database:
    """SQLite database of a run. Subclasses define its tables.

    Args:
        path: the database file, created if missing; None for a database in memory.
        wait: seconds to wait while another process has the database locked.
        readonly: open an existing database for reading.

    Raises:
        RunError: the file is not a run's database, is damaged, or was created by a newer version.
        DiskFull: the disk is full.
        OSError: the database cannot be created.
    """

    tables: ClassVar[str] = ""
    """SQL statement that creates the tables if they are missing."""
    version: ClassVar[int] = 1
    """Version of the tables."""

    def __init__(self, path: Path | None, *, wait: float = _WAIT, readonly: bool = False) -> None:
        self._path = path or Path(":memory:")
        with self._faults():
            # Several threads may use the connection, but only one at a time.
            self._database = _connect(path, wait, readonly)
            try:
                self.journal = "" if readonly else _journal(self._database)
                """SQLite's journal mode: ``wal``, or ``delete`` if the file system does not support WAL (NFS)."""
                self._prepare(readonly)
            except BaseException:  # also on Ctrl-C, close the file
                self._database.close()
                raise
        if path is not None and self.journal == "delete":
            message = f"{path.parent}: this file system has no shared memory, so SQLite uses a rollback journal"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Close the database; closing it again does nothing."""
        self._database.close()

    def __enter__(self) -> Self:
        """Use the database in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
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
        """Convert SQLite's errors to a :class:`RunError` or :class:`DiskFull`."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise disk_full(self._path, error) from error
            is_busy = code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise RunError(
                f"{self._path} cannot be used",
                reason=f"SQLite says: {error}",
                hint="end the program that has it open, and give the same command again: what is finished is kept"
                if is_busy
                else "check who owns the directory and its disk; where the file is damaged, give another directory",
            ) from error


def _connect(path: Path | None, wait: float, readonly: bool) -> sqlite3.Connection:
    """Open a database file.

    A reader uses SQLite's locks if possible, because ``immutable`` could return stale or half-written rows while a run
    is writing. With WAL, a reader needs the files ``-wal`` and ``-shm``. If they are missing and the directory is
    read-only, open the database with ``immutable`` (sqlite.org/wal.html#read_only_databases).
    """
    uri = "file::memory:" if path is None else path.absolute().as_uri()

    def connect(mode: str) -> sqlite3.Connection:
        return sqlite3.connect(f"{uri}{mode}", timeout=wait, isolation_level=None, check_same_thread=False, uri=True)

    connection = connect("?mode=ro" if readonly else "")
    if readonly and path is not None:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            connection.close()
            if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
                raise
            connection = connect("?immutable=1")
    return connection


def _journal(database: sqlite3.Connection) -> str:
    """Set and return the journal mode: WAL, or a rollback journal if the file system does not support WAL.

    WAL needs shared memory, which network file systems lack (sqlite.org/wal.html). On such a file system, SQLite
    rejects the mode or fails at the first read. Set ``MINISANDBOX_NO_WAL=1`` for file systems on which
    WAL seems to work, but is unreliable.
    """
    modes = ("delete",) if os.environ.get("MINISANDBOX_NO_WAL") == "1" else ("wal", "delete")
    journal_mode = ""
    for mode in modes:
        try:
            (journal_mode,) = database.execute(f"PRAGMA journal_mode = {mode}").fetchone()
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            continue
        if journal_mode == mode:
            break
    database.execute("PRAGMA synchronous = FULL")
    return str(journal_mode)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one job.

    Attributes:
        id: id of the job.
        fingerprint: hash of all inputs that the result depends on. A resumed run ignores a result with another
            fingerprint.
        final: whether a resumed run keeps the result instead of repeating the job.
        body: the result as a JSON object; a dataclass in it is stored as a list of its fields.
    """

    id: str
    fingerprint: str
    final: bool
    body: Mapping[str, object]


class Results(Database):
    """The results of a run. Only one thread may use the object; other processes may read the file meanwhile.

    Arguments and errors are those of :class:`.Database`.
    """

    tables = _RESULTS

    def put(self, result: Result) -> None:
        """Store a result durably in one transaction, replacing an earlier result of the same job.

        Raises:
            DiskFull: the disk is full; an earlier result is unchanged.
            RunError: the database cannot be written.
        """
        end_time = datetime.now(UTC).isoformat(timespec="seconds")
        # Keep json's ASCII output: unpaired surrogates (paths that are not UTF-8) can only be stored as JSON escapes.
        body = json.dumps(dict(result.body), default=dataclasses.astuple)
        row = (result.id, result.fingerprint, int(result.final), end_time, body)
        with self._faults():
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", row)

    def __iter__(self) -> Iterator[Result]:
        """Yield all results, sorted by id."""
        with self._faults():
            rows = self._database.execute("SELECT id, fingerprint, final, body FROM results ORDER BY id").fetchall()
        for name, fingerprint, final, body in rows:
            yield Result(name, fingerprint, bool(final), json.loads(body))
