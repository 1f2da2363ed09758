"""Results: a small SQLite database in a run directory, one transaction per finished piece of work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from minisandbox.store.database import Database

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


@dataclass(frozen=True, slots=True)
class Result:
    """One row.

    Attributes:
        id: whose result it is.
        fingerprint: a hash of everything that it rests on; with another one it counts for nothing.
        final: whether it stays; otherwise it is done again.
        body: the result, as JSON has it; a dataclass in it is stored as the list of its fields.
    """

    id: str
    fingerprint: str
    final: bool
    body: Mapping[str, object]


class Results(Database):
    """The results of a run. One thread uses it; other processes may read the file meanwhile.

    Arguments and errors are those of :class:`.Database`.
    """

    tables = _TABLES
    version = VERSION

    def put(self, result: Result) -> None:
        """Keep a result in place of an earlier one, durably, in one transaction.

        Raises:
            DiskFull: the disk is full; what was there is still there.
            RunError: the database cannot be written.
        """
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        # ASCII: texts with lone surrogates (paths that are not UTF-8) have no UTF-8, but escapes
        body = json.dumps(dict(result.body), default=dataclasses.astuple)
        row = (result.id, result.fingerprint, int(result.final), ended, body)
        with self._faults():
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", row)

    def get(self, name: str) -> Result | None:
        """Return the result of an id, or None if it has no result."""
        return next(self._rows("SELECT id, fingerprint, final, body FROM results WHERE id = ?", name), None)

    def __iter__(self) -> Iterator[Result]:
        """Yield all results, in the order of their ids."""
        return self._rows("SELECT id, fingerprint, final, body FROM results ORDER BY id")

    def _rows(self, query: str, *values: str) -> Iterator[Result]:
        with self._faults():
            rows = self._database.execute(query, values)
            return iter([Result(name, mark, bool(final), json.loads(body)) for name, mark, final, body in rows])
