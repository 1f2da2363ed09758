"""The SQLite database of a run: one row per rollout, with columns for queries and the compressed trajectory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import zstandard

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Verdict
from minisandbox.models import TokenUsage
from minisandbox.rollouts.summary import Summary
from minisandbox.runs import Database
from minisandbox.trajectories import Timings, Trajectory

NAME = "rollouts.sqlite"
"""The file name of the database in a run's directory."""

_TIMES = tuple(field.name for field in dataclasses.fields(Timings))
_USAGE = tuple(field.name for field in dataclasses.fields(TokenUsage))
_SAME = (
    "instance_id", "attempt", "exit_status", "reason", "detail", "reward", "failed_in", "tries", "turns", "steps",
    "cost", "agent", "model", "started", "flags",
)  # fmt: skip
"""Fields of :class:`.Summary` that are columns of the same name."""
_COLUMNS = (
    *_SAME, "verdict", *(f"{name}_tokens" for name in _USAGE), *(f"{name}_seconds" for name in _TIMES)
)  # fmt: skip
_SUMMARY = f"SELECT {', '.join(_COLUMNS)} FROM rollouts"  # noqa: S608 - constants only
_PUT = (
    f"INSERT OR REPLACE INTO rollouts ({', '.join(_COLUMNS)}, ended, patch, trajectory) "  # noqa: S608 - constants only
    f"VALUES ({', '.join('?' * (len(_COLUMNS) + 3))})"
)
_LEVEL = 3
_TABLES = f"""
CREATE TABLE IF NOT EXISTS rollouts (
    instance_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,         -- from 0
    exit_status TEXT NOT NULL,
    verdict TEXT,                     -- NULL where grading was not reached
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    reward REAL,                      -- NULL after an infrastructure error or unconfirmed pass: repeated on resume
    failed_in TEXT NOT NULL,          -- the phase with an infrastructure error, or ''
    tries INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    cost REAL NOT NULL,               -- US dollars
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    started TEXT NOT NULL,            -- UTC, ISO 8601
    {"".join(f"{name}_seconds REAL NOT NULL, " for name in _TIMES)}
    ended TEXT NOT NULL,              -- UTC, ISO 8601
    patch BLOB,                       -- the submission; NULL where none could be taken
    trajectory BLOB NOT NULL,         -- JSON, compressed by zstandard
    flags TEXT NOT NULL DEFAULT '',   -- kinds of the grade's flags that concern the submission, separated by ', '
    PRIMARY KEY (instance_id, attempt)
)
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """A rollout in the form that the database stores. Packing is slow, but storing a packed rollout is fast.

    Attributes:
        summary: the values of the columns for queries.
        patch: the submission; None if no patch could be taken.
        trajectory: the whole record as JSON, compressed by zstandard.
    """

    summary: Summary
    patch: bytes | None
    trajectory: bytes


def pack(trajectory: Trajectory) -> Packed:
    """Serialize and compress a rollout. This is slow for many tokens, so do not call it on the event loop."""
    data = trajectory.to_text(indent=None).encode("ascii")
    blob = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return Packed(Summary.of(trajectory), trajectory.submission, blob)


def unpack(trajectory: bytes, *, name: str) -> Trajectory:
    """Decode a rollout's record.

    Args:
        trajectory: the compressed record of :class:`Packed`.
        name: the record's name in error messages.

    Raises:
        TrajectoryError: the record cannot be read.
    """
    try:
        text = zstandard.ZstdDecompressor().decompress(trajectory).decode("ascii")
    except (zstandard.ZstdError, ValueError, TypeError) as error:
        raise TrajectoryError(f"{name} cannot be read", reason=f"it is damaged: {error}") from error
    return Trajectory.from_text(text, name=name)


class RolloutDatabase(Database):
    """The database of a run's rollouts. Thread-safe; other processes may read the file at the same time.

    Takes the arguments of :class:`.Database`, and raises the same errors.
    """

    tables = _TABLES

    def put(self, packed: Packed) -> Summary:
        """Store a rollout durably in one transaction; replace an earlier record of the same rollout.

        Args:
            packed: the rollout.

        Returns:
            The rollout's summary.

        Raises:
            DiskFull: the disk is full; earlier rollouts are kept.
            RunError: the database cannot be written.
        """
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        with self._writing, self._faults():
            self._database.execute(_PUT, (*_values(packed.summary), ended, packed.patch, packed.trajectory))
        return packed.summary

    def summaries(self) -> Iterator[Summary]:
        """Return the summaries of all rollouts, ordered by task and attempt."""
        with self._writing, self._faults():
            rows = self._database.execute(f"{_SUMMARY} ORDER BY instance_id, attempt").fetchall()
        return map(_summary, rows)

    def patches(self) -> Iterator[tuple[str, int, bytes]]:
        """Return the task id, attempt and submission of all rollouts with a submission, ordered by task and attempt."""
        query = "SELECT instance_id, attempt, patch FROM rollouts WHERE patch NOT NULL ORDER BY instance_id, attempt"
        with self._writing, self._faults():
            return iter(self._database.execute(query).fetchall())

    def trajectory(self, instance_id: str, attempt: int) -> Trajectory | None:
        """Return a rollout's record, or None if there is no such rollout.

        Raises:
            TrajectoryError: the record cannot be read.
        """
        query = "SELECT trajectory FROM rollouts WHERE instance_id = ? AND attempt = ?"
        with self._writing, self._faults():
            row = self._database.execute(query, (instance_id, attempt)).fetchone()
        if row is None:
            return None
        return unpack(row[0], name=f"{self._path}: {instance_id}, attempt {attempt}")

    def _prepare(self, readonly: bool) -> None:
        self._writing = threading.Lock()
        super()._prepare(readonly)
        if "flags" not in (name for _, name, *_ in self._database.execute("PRAGMA table_info(rollouts)")):
            # The run is older than this column; a reader may not add it.
            view = "CREATE TEMP VIEW rollouts AS SELECT *, '' AS flags FROM main.rollouts"
            self._database.execute(
                view if readonly else "ALTER TABLE rollouts ADD COLUMN flags TEXT NOT NULL DEFAULT ''"
            )


def _values(summary: Summary) -> tuple[str | int | float | None, ...]:
    """Return a summary's column values, with unpaired surrogates escaped because SQLite rejects them."""
    values = (
        *(getattr(summary, name) for name in _SAME), summary.verdict,
        *(getattr(summary.usage, name) for name in _USAGE), *(getattr(summary.timings, name) for name in _TIMES),
    )  # fmt: skip
    return tuple(
        str(value).encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value for value in values
    )


def _summary(row: tuple[Any, ...]) -> Summary:
    values = dict(zip(_COLUMNS, row, strict=True))
    return Summary(
        verdict=None if values["verdict"] is None else Verdict(values["verdict"]),
        timings=Timings(**{name: values[f"{name}_seconds"] for name in _TIMES}),
        usage=TokenUsage(**{name: values[f"{name}_tokens"] for name in _USAGE}),
        **{name: values[name] for name in _SAME},
    )
