"""Outcomes of tests that a run has seen, shared by its processes: equal workspaces are tested once.

This assumes deterministic tests, as ``reuse_grades`` of ``minisandbox train rl`` does. That option forgets grades when
its process ends; these outcomes also serve the run's other arms.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from minisandbox.grade import Grade
from minisandbox.rollouts import KnownGrades
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.trajectories.codec import from_json, to_json

_BUSY_SECONDS = 60.0


class Known:
    """A table of strings in a file; any thread and any process may use it.

    Args:
        path: the database, created if missing.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=OFF")  # a lost outcome is measured again
        self._database.execute("CREATE TABLE IF NOT EXISTS outcomes (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        with self._lock:
            row = self._database.execute("SELECT value FROM outcomes WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        """Set the value of a key."""
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?)", (key, value))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()


class StoredGrades(KnownGrades):
    """A cache of grades that outlives its process.

    Args:
        known: the table of outcomes.
    """

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._table = known

    def of(
        self,
        image: str,
        task: str,
        submission: bytes,
        make: Callable[[], Grade],
        cancellation: Cancellation | None = None,
    ) -> Grade:
        """Return a submission's grade, from the table or by calling ``make``; see the base class."""
        key = f"grade {image} {task} {hashlib.sha256(submission).hexdigest()}"
        stored = self._table.get(key)
        if stored is not None:
            return from_json(Grade, json.loads(stored), location=key)
        grade = super().of(image, task, submission, make, cancellation)
        if grade.resolved is not None:
            self._table.put(key, json.dumps(to_json(grade)))
        return grade
