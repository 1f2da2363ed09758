"""Results: a small SQLite database in a run directory, one transaction per finished piece of work."""

from __future__ import annotations

import json
import os
import sqlite3
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from minisandbox.errors import RunError
from minisandbox.store.rundir import disk_full

VERSION = 1
"""Of the tables."""

_TABLES = """
CREATE TABLE IF NOT EXISTS results (
    id TEXT PRIMARY KEY,        -- whose result it is
    fingerprint TEXT NOT NULL,  -- of everything that it rests on
    final INTEGER NOT NULL,     -- 0: we failed, and do it again
    ended TEXT NOT NULL,        -- UTC, ISO 8601
    body TEXT NOT NULL          -- JSON
)
"""
_WAIT = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """One row.

    Attributes:
        id: whose result it is.
        fingerprint: a hash of everything that it rests on; with another one it counts for nothing.
        final: whether it stays; otherwise it is done again.
        body: the result, as JSON has it.
    """

    id: str
    fingerprint: str
    final: bool
    body: Mapping[str, object]


class Results:
    """The results of a run. One thread uses it; other processes may read the file meanwhile.

    Args:
        path: the database's file, made if it is not there; None for one in memory.

    Raises:
        RunError: the file is no such database, damaged, or of a newer version.
        DiskFull: the disk is full.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path or Path(":memory:")
        with self._faults():
            self._database = sqlite3.connect(self._path, timeout=_WAIT, isolation_level=None)
            self.journal = _journal(self._database)
            """How a transaction is made durable: ``wal``; ``delete`` where the file system cannot do that (NFS)."""
            self._prepare()

    def put(self, result: Result) -> None:
        """Keep a result in place of an earlier one, durably, in one transaction.

        Raises:
            DiskFull: the disk is full; what was there is still there.
            RunError: the database cannot be written.
        """
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        # ASCII: texts with lone surrogates (paths that are not UTF-8) have no UTF-8, but escapes
        body = json.dumps(dict(result.body))
        row = (result.id, result.fingerprint, int(result.final), ended, body)
        with self._faults():
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", row)

    def get(self, name: str) -> Result | None:
        """Return the result of an id, or None where there is none."""
        return next(self._rows("SELECT id, fingerprint, final, body FROM results WHERE id = ?", name), None)

    def __iter__(self) -> Iterator[Result]:
        """All results, in the order of their ids."""
        return self._rows("SELECT id, fingerprint, final, body FROM results ORDER BY id")

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        self._database.close()

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def _rows(self, query: str, *values: str) -> Iterator[Result]:
        with self._faults():
            rows = self._database.execute(query, values)
            return iter([Result(name, mark, bool(final), json.loads(body)) for name, mark, final, body in rows])

    def _prepare(self) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            self._database.close()
            raise RunError(
                f"{self._path} has version {version}; this MiniSandbox knows up to {VERSION}",
                reason="a newer MiniSandbox made it",
                hint="update MiniSandbox, or give another directory",
            )
        self._database.execute(_TABLES)
        self._database.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise disk_full(self._path, error) from error
            raise RunError(
                f"{self._path} cannot be used",
                reason=f"SQLite says: {error}",
                hint="check who owns the directory and its disk; where the file is damaged, give another directory",
            ) from error


def _journal(database: sqlite3.Connection) -> str:
    """Choose the journal: write-ahead where the file system can do it, with a fall-back where it cannot.

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
