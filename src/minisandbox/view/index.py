"""Answer questions about a run from the columns of its database, without reading trajectories.

SQLite reads the columns for queries from a temporary table in memory, because the table on disk also contains the
trajectories. The copy is renewed when another process has changed the database.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple
from urllib.parse import urlencode

from minisandbox.rollouts.database import RolloutDatabase

PAGE = 100
"""Rollouts per page."""

STAGES = {
    "queued": "queued_seconds",
    "sandbox": "sandbox_ready_seconds",
    "model": "model_seconds",
    "commands": "commands_seconds",
    "agent": "max(0, agent_seconds - model_seconds - commands_seconds)",
    "patch": "patch_seconds",
    "grade": "grade_seconds",
}
"""The stages of a rollout, which do not overlap, with the SQL of their durations."""

_SORTS = {
    "task": "instance_id, attempt",
    "longest": "total_seconds DESC",
    "turns": "turns DESC",
    "tokens": "prompt_tokens + completion_tokens DESC",
    "cost": "cost DESC",
    "newest": "ended DESC",
}
_COPY = """
CREATE TEMP TABLE listed AS SELECT *,
    CASE WHEN failed_in <> '' THEN 'failed in ' || failed_in ELSE coalesce(verdict, 'not graded') END AS outcome,
    repository(instance_id) AS repository,
    CASE WHEN failed_in <> '' THEN '' WHEN verdict = 'tampered' THEN 'tampered'
         WHEN verdict = 'unconfirmed' THEN 'not confirmed'
         WHEN verdict = 'resolved' AND instr(flags, 'suspicious: ') THEN 'suspicious pass' ELSE '' END AS doubt
FROM (SELECT {columns} FROM rollouts)
"""
_ROW = (
    "instance_id, attempt, outcome, reason, detail, exit_status, reward, turns, steps, prompt_tokens + "
    "completion_tokens, cost, total_seconds, tries, flags, doubt"
)


class Row(NamedTuple):
    """A rollout in a list."""

    instance_id: str
    attempt: int
    outcome: str
    reason: str
    detail: str
    exit_status: str
    reward: float | None
    turns: int
    steps: int
    tokens: int
    cost: float
    seconds: float
    tries: int
    flags: str
    doubt: str


LEVELS = {
    "too easy": "every rollout passes",
    "mixed": "some rollouts pass",
    "too hard": "no rollout passes",
    "too few": "fewer than two rollouts have a reward",
}
"""The levels of tasks, with what they mean."""


class TaskRow(NamedTuple):
    """The rollouts of a task together."""

    instance_id: str
    repository: str
    rollouts: int
    rewarded: int
    reward: float | None
    seconds: float
    doubts: int

    @property
    def level(self) -> str:
        """A key of :data:`LEVELS`."""
        if self.reward is None or self.rewarded < 2:
            return "too few"
        return "too easy" if self.reward >= 1 else "too hard" if self.reward <= 0 else "mixed"


class Mix(NamedTuple):
    """The rollouts of a training step by what their grades are worth."""

    step: int
    rollouts: int
    believed: int
    suspicious: int
    unconfirmed: int
    tampered: int

    @property
    def doubts(self) -> int:
        """Passes in doubt, and tampering."""
        return self.suspicious + self.unconfirmed + self.tampered


class Totals(NamedTuple):
    """Sums over rollouts; ``reward`` is the mean of those with a reward."""

    rollouts: int
    tasks: int
    rewarded: int
    rewarded_tasks: int
    reward: float | None
    cost: float
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    first: str | None
    last: str | None
    doubts: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean reward by Wilson; it counts each task once, since its rollouts are alike."""
        return None if self.reward is None else wilson(self.reward, self.rewarded_tasks)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rollouts a list shows, as in the query of its URL; empty fields accept all."""

    outcome: str = ""
    status: str = ""
    repo: str = ""
    reason: str = ""
    doubt: str = ""
    text: str = ""
    sort: str = "task"
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Read the query of a URL; unknown and invalid fields are ignored."""
        names = {field.name for field in fields(cls)} - {"page"}
        page = query.get("page", "")
        values = {name: query[name] for name in names if name in query}
        return cls(**values, page=max(1, int(page)) if page.isdecimal() and len(page) < 7 else 1)

    def url(self, **changes: object) -> str:
        """Return the query with changed fields; another filter starts at the first page."""
        changed = replace(self, **({"page": 1} | changes))  # type: ignore[arg-type] # fields of this class
        pairs = {field.name: getattr(changed, field.name) for field in fields(self)}
        return "?" + urlencode({name: value for name, value in pairs.items() if value != getattr(Filter(), name)})

    @property
    def is_empty(self) -> bool:
        """Whether all rollouts are accepted."""
        return replace(self, sort="task", page=1) == Filter()

    def where(self) -> tuple[str, list[object]]:
        """Return the SQL condition and its parameters."""
        columns = {"outcome": self.outcome, "exit_status": self.status, "repository": self.repo, "reason": self.reason}
        terms = [(f"{column} = ?", [value]) for column, value in columns.items() if value]
        if self.doubt:
            terms.append(("doubt <> ''", []) if self.doubt == "any" else ("doubt = ?", [self.doubt]))
        if self.text:
            terms.append(("(instr(lower(instance_id), lower(?)) OR instr(lower(detail), lower(?)))", [self.text] * 2))
        condition = " AND ".join(term for term, _ in terms) or "1"
        return condition, [value for _, values in terms for value in values]


class RunIndex(RolloutDatabase):
    """The database of a run, for queries. Thread-safe."""

    _copied = -1
    """SQLite's ``data_version`` when the columns were copied."""

    def totals(self, choice: Filter) -> Totals:
        """Return the sums over the accepted rollouts."""
        columns = (
            "count(*), count(DISTINCT instance_id), count(reward), count(DISTINCT CASE WHEN reward NOT NULL THEN "
            "instance_id END), avg(reward), total(cost), coalesce(sum(prompt_tokens), 0), "
            "coalesce(sum(completion_tokens), 0), total(total_seconds), min(started), max(ended), "
            "count(nullif(doubt, ''))"
        )
        return Totals(*self._select(columns, choice)[0])

    def stages(self, choice: Filter) -> dict[str, float]:
        """Return the seconds of each stage, over the accepted rollouts together."""
        sums = self._select(", ".join(f"total({sql})" for sql in STAGES.values()), choice)[0]
        return dict(zip(STAGES, sums, strict=True))

    def counts(self, column: str, choice: Filter) -> list[tuple[str, int, float | None]]:
        """Return the values of a column with their numbers of rollouts and mean rewards, most frequent first.

        Args:
            column: ``outcome``, ``exit_status``, ``repository``, ``reason`` or ``doubt``.
            choice: the filter.
        """
        if column not in ("outcome", "exit_status", "repository", "reason", "doubt"):
            raise ValueError(column)
        end = f"AND {column} <> '' GROUP BY {column} ORDER BY count(*) DESC, {column} LIMIT 40"
        return self._select(f"{column}, count(*), avg(reward)", choice, end)

    def rows(self, choice: Filter, limit: int = PAGE) -> list[Row]:
        """Return one page of the accepted rollouts."""
        order = _SORTS.get(choice.sort, _SORTS["task"])
        end = f"ORDER BY {order} LIMIT {limit} OFFSET {(choice.page - 1) * limit}"
        return [Row(*row) for row in self._select(_ROW, choice, end)]

    def tasks(self, choice: Filter, limit: int = 1_000_000) -> list[TaskRow]:
        """Return the tasks of the accepted rollouts, lowest mean reward first."""
        columns = (
            "instance_id, repository, count(*), count(reward), avg(reward) AS mean, avg(total_seconds), "
            "count(nullif(doubt, ''))"
        )
        end = f"GROUP BY instance_id ORDER BY mean IS NULL, mean, instance_id LIMIT {limit}"
        return [TaskRow(*row) for row in self._select(columns, choice, end)]

    def attempts(self, instance_id: str) -> list[Row]:
        """Return all rollouts of a task."""
        query = f"SELECT {_ROW} FROM listed WHERE instance_id = ? ORDER BY attempt"  # noqa: S608 - constants only
        return [Row(*row) for row in self._fetch(query, [instance_id])]

    def mixes(self, width: int) -> list[Mix]:
        """Return the rollouts of each training step.

        Args:
            width: the number of attempts of a task that belong to a step.
        """
        kinds = ("resolved", "suspicious pass", "not confirmed", "tampered")
        sums = ", ".join(f"sum(iif(doubt <> '', doubt, outcome) = '{kind}')" for kind in kinds)
        query = f"SELECT attempt / ? + 1 AS step, count(*), {sums} FROM listed GROUP BY step ORDER BY step"  # noqa: S608 - constants only
        return [Mix(*row) for row in self._fetch(query, [width])]

    def neighbours(self, instance_id: str, attempt: int) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
        """Return the ids and attempts of the rollouts before and after a rollout."""
        key, columns = [instance_id, attempt], "SELECT instance_id, attempt FROM listed WHERE (instance_id, attempt)"
        before = self._fetch(f"{columns} < (?, ?) ORDER BY instance_id DESC, attempt DESC LIMIT 1", key)
        after = self._fetch(f"{columns} > (?, ?) ORDER BY instance_id, attempt LIMIT 1", key)
        return next(iter(before), None), next(iter(after), None)

    def _select(self, columns: str, choice: Filter, end: str = "") -> list[tuple[Any, ...]]:
        condition, values = choice.where()
        return self._fetch(f"SELECT {columns} FROM listed WHERE {condition} {end}", values)  # noqa: S608 - constants only

    def _fetch(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._writing, self._faults():
            self._refresh()
            return self._database.execute(query, tuple(values)).fetchall()

    def _refresh(self) -> None:
        """Copy the columns for queries, if another process has changed the database since the last copy."""
        (version,) = self._database.execute("PRAGMA data_version").fetchone()
        if version == self._copied:
            return
        self._database.execute("DROP TABLE IF EXISTS temp.listed")
        columns = [name for name, *_ in self._database.execute("SELECT * FROM rollouts LIMIT 0").description]
        names = ", ".join(name for name in columns if name not in ("patch", "trajectory"))
        self._database.execute(_COPY.format(columns=names))
        self._copied = version

    def _prepare(self, readonly: bool) -> None:
        self._database.execute("PRAGMA temp_store = MEMORY")  # first: a change deletes all temporary views
        super()._prepare(readonly)
        self._database.create_function("repository", 1, repository_of, deterministic=True)


def repository_of(instance_id: str) -> str:
    """Return the repository of a task: ``owner/name`` for ``owner__name-123`` or ``owner__name.1a2b3c4d.kind__5``."""
    owner, separator, end = instance_id.partition("__")
    if not separator:
        return instance_id.rpartition("-")[0] or instance_id
    name = end.split("__")[0].split(".")[0]
    head, dash, number = name.rpartition("-")
    return f"{owner}/{head if dash and number.isdecimal() else name}"


def wilson(mean: float, count: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a proportion (Wilson 1927), or None for no observation."""
    if not count:
        return None
    z = 1.96
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)
