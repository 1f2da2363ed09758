"""Store the results of a run in SQLite, each result in its own transaction."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from minisandbox.store.database import Database

VERSION = 1
"""Version of the database schema."""

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

    tables = _TABLES
    version = VERSION

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

    def get(self, name: str) -> Result | None:
        """Return the result of a job, or None if there is no result."""
        return next(self._rows("SELECT id, fingerprint, final, body FROM results WHERE id = ?", name), None)

    def __iter__(self) -> Iterator[Result]:
        """Yield all results, sorted by id."""
        return self._rows("SELECT id, fingerprint, final, body FROM results ORDER BY id")

    def _rows(self, query: str, *parameters: str) -> Iterator[Result]:
        with self._faults():
            rows = self._database.execute(query, parameters)
            return iter(
                [Result(name, fingerprint, bool(final), json.loads(body)) for name, fingerprint, final, body in rows]
            )
