"""Render the pages. Templates escape every value, and show control characters as escapes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from minisandbox import __version__
from minisandbox.errors import NotFound
from minisandbox.grade import Verdict
from minisandbox.rollouts.replay import Replay, replay_patches
from minisandbox.sandbox import live_sandboxes
from minisandbox.store import Store, default_root
from minisandbox.store.overview import image_rows
from minisandbox.trajectories import Trajectory
from minisandbox.values import human_size
from minisandbox.view import charts
from minisandbox.view.index import LEVELS, PAGE, Filter, Row, RunIndex, TaskRow, Totals
from minisandbox.view.rollout import TOKENS, failure_lines, tests_by_outcome, token_spans, turns_of
from minisandbox.view.site import Run, Site
from minisandbox.view.text import diff_of, excerpt, visible
from minisandbox.view.training import curves, plan_of, rise_of, rollouts_of

STATIC = Path(__file__).parent / "static"
_TEMPLATES = Path(__file__).parent / "templates"
_NOTHING = "-"
_STILL = 600.0
"""Seconds after the last rollout until a run is no longer called in progress."""
_HEADINGS = {
    Verdict.RESOLVED: "Resolved: all named tests passed",
    Verdict.UNCONFIRMED: "In doubt: all named tests passed, and no further run confirmed it",
    Verdict.TAMPERED: "Not believed: the submission changed how it was graded",
}
_DOUBTS = {
    "tampered": "The submission passes tests that a correct solution must fail: it cheats. The reward is 0.",
    "not confirmed": "All named tests passed, but no run of changed tests confirmed it. There is no reward, unless the "
    "training counts such passes.",
    "suspicious pass": "All named tests passed, but the patch has code that can cheat. It has reward 1: read it.",
}
"""The kinds of grades in doubt, and what each means."""
_FLAGS = {
    "frame_walking": "reads variables of the code that calls it",
    "runner_internals": "touches the test runner",
    "test_detection": "finds out whether a test runs",
    "process_control": "ends, forks or signals processes",
    "interpreter_hooks": "hooks into the interpreter",
    "machine_state": "reads or changes the machine's state",
    "test_reading": "looks for test files",
    "memory_access": "reads or writes memory",
    "always_true": "defines a comparison that is always true",
    "own_comparison": "defines how results compare, such as __eq__",
    "monkey_patching": "replaces other modules' code",
}
"""The kinds of suspicious code (:mod:`minisandbox.grade.scan`), for reading."""
_TONES = {
    "resolved": "good", "passed": "good", "unconfirmed": "doubt", "tampered": "doubt", "not graded": "broken",
    "infra_error": "broken", "too easy": "doubt", "too hard": "bad", "mixed": "good", "too few": "none",
}  # fmt: skip


class Links:
    """URLs of the pages. An export has other links."""

    is_static = False

    def runs(self) -> str:
        """The page of all runs."""
        return "/"

    def run(self, key: str, query: str = "") -> str:
        """The page of a run; ``query`` is its filter."""
        return f"/runs/{quote(key, safe='')}{query}"

    def machine(self) -> str:
        """The page of images and sandboxes."""
        return "/machine"

    def compare(self, first: str, second: str) -> str:
        """The comparison of two runs."""
        return "/compare?" + urlencode((("run", first), ("run", second)))

    def task(self, key: str, instance_id: str) -> str:
        """The page of a task in a run."""
        return f"{self.run(key)}/tasks/{quote(instance_id)}"

    def rollout(self, key: str, instance_id: str, attempt: int) -> str:
        """The page of a rollout."""
        return f"{self.run(key)}/rollouts/{attempt}/{quote(instance_id)}"

    def tokens(self, key: str, instance_id: str, attempt: int, row: int = 0, start: int = 0) -> str:
        """The tokens of a rollout."""
        query = urlencode({"row": row, "start": start})
        return f"{self.run(key)}/tokens/{attempt}/{quote(instance_id)}?{query}"

    def training(self, key: str, step: int = 0) -> str:
        """The curves of a training run, with the rollouts of a step."""
        return f"{self.run(key)}/training?{urlencode({'step': step})}" if step else f"{self.run(key)}/training"

    def replay(self, key: str, instance_id: str, attempt: int) -> str:
        """Where the button of a rollout without diffs of turns sends its request."""
        return f"{self.run(key)}/replay/{attempt}/{quote(instance_id)}"

    def raw(self, key: str, instance_id: str, attempt: int, part: str) -> str:
        """A text of a rollout, whole."""
        return f"{self.run(key)}/raw/{attempt}/{quote(instance_id)}?{urlencode({'part': part})}"


class Pages:
    """The pages of a site.

    Args:
        site: the runs.
        links: the URLs in the pages.
    """

    def __init__(self, site: Site, links: Links | None = None) -> None:
        self.site, self.links = site, links or Links()
        self._replays: dict[tuple[str, str, int], Replay] = {}
        self._replaying = threading.Lock()
        self._environment = Environment(
            loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_shown,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._environment.filters |= {
            "seconds": duration, "number": number, "percent": percent, "rate": rate, "size": human_size,
            "excerpt": excerpt, "diff": diff_of, "when": when, "tone": tone,
        }  # fmt: skip
        self._environment.globals |= {
            "links": self.links, "charts": charts, "version": __version__, "page_size": PAGE, "doubts": _DOUBTS,
            "levels": LEVELS, "explain": _explained,
        }  # fmt: skip

    def render(self, template: str, **values: object) -> str:
        """Render a template."""
        return self._environment.get_template(template).render(values)

    def totals(self) -> list[tuple[Run, Totals]]:
        """Return all runs with their totals, latest first."""
        rows = [(run, run.index.totals(Filter())) for run in self.site.runs()]
        return sorted(rows, key=lambda row: row[1].last or "", reverse=True)

    def runs(self) -> str:
        """Render the page of all runs."""
        return self.render("runs.html", title="Runs", runs=self.totals())

    def run(self, key: str, choice: Filter, template: str = "run.html", limit: int = PAGE) -> str:
        """Render the page of a run, with this number of rollouts."""
        run = self.site.run(key)
        index = run.index
        columns = ("outcome", "exit_status", "reason", "repository", "doubt")
        counts = {column: index.counts(column, choice) for column in columns}
        in_doubt = index.rows(replace(choice, doubt=choice.doubt or "any", page=1), 5) if counts["doubt"] else []
        everything = index.totals(Filter())
        return self.render(
            template, title=key, run=run, choice=choice, all=everything, totals=index.totals(choice),
            stages=index.stages(choice), counts=counts, rows=index.rows(choice, limit), in_doubt=in_doubt,
            longest=index.rows(replace(choice, sort="longest", page=1), 3), left=_left(everything, run.expected),
            tasks_by_level=_by_level(index.tasks(choice)),
        )  # fmt: skip

    def tasks(self, key: str, choice: Filter, level: str = "") -> str:
        """Render the list of a run's tasks; ``level`` accepts only those of a level."""
        tasks = _by_level(self.site.run(key).index.tasks(choice))
        shown = [task for name in LEVELS if level in ("", name) for task in tasks[name]]
        return self.render(
            "tasks.html", title=f"{key}: tasks", run=self.site.run(key), choice=choice, tasks=shown, level=level,
            tasks_by_level=tasks,
        )  # fmt: skip

    def machine(self) -> str:
        """Render the images of this user's store, and the live sandboxes."""
        root = default_root()
        images = image_rows(Store.open()) if root.is_dir() else []
        return self.render(
            "machine.html", title="Images and sandboxes", root=root, images=images, sandboxes=live_sandboxes(),
            now=time.time(),
        )  # fmt: skip

    def compare(self, keys: Sequence[str]) -> str:
        """Render the comparison of two runs.

        Raises:
            NotFound: there are not two names, or there is no such run.
        """
        if len(keys) != 2:
            raise NotFound(f"{len(keys)} runs cannot be compared", hint="go back and choose two runs")
        runs = [self.site.run(key) for key in keys]
        tasks = [{task.instance_id: task for task in run.index.tasks(Filter())} for run in runs]
        return self.render(
            "compare.html", title=" and ".join(keys), runs=runs, changes=_changes(*tasks),
            common=len(tasks[0].keys() & tasks[1].keys()), totals=[run.index.totals(Filter()) for run in runs],
            stages=[run.index.stages(Filter()) for run in runs],
            counts=_paired([run.index.counts("outcome", Filter()) for run in runs]),
            options=[
                (name, *(run.config.get(name) for run in runs)) for name in sorted(runs[0].config | runs[1].config)
                if runs[0].config.get(name) != runs[1].config.get(name)
            ],
        )  # fmt: skip

    def task(self, key: str, instance_id: str) -> str:
        """Render the rollouts of a task, with the outcome of each test in each rollout."""
        run = self.site.run(key)
        rows = run.index.attempts(instance_id)
        if not rows:
            raise NotFound(f"{key} has no rollout of {instance_id}")
        trajectories = [trajectory_of(run.index, instance_id, row.attempt) for row in rows[:32]]
        tests: dict[str, list[str]] = {}
        for column, trajectory in enumerate(trajectories):
            for test, outcome in trajectory.grade.outcomes if trajectory.grade else ():
                tests.setdefault(test, [""] * len(trajectories))[column] = outcome
        differing = [(test, row) for test, row in tests.items() if {*row} != {"passed"}]
        passing = [test for test, row in tests.items() if {*row} == {"passed"}]
        return self.render(
            "task.html", title=instance_id, run=run, instance_id=instance_id, rows=rows, tests=differing,
            trajectories=trajectories, statement=_statement(trajectories[0]), passing=passing,
        )  # fmt: skip

    def training(self, key: str, step: int) -> str:
        """Render the curves of the training run to which a run belongs, and the rollouts of a step."""
        run = self.site.run(key)
        path = run.training
        if path is None:
            raise NotFound(f"{key} does not belong to a training run")
        points_of = dict(curves(path))
        drawn = [
            (name, [(*point, self.links.training(key, int(point[0]))) for point in points_of[name]])
            for name in points_of
        ]
        parts = rollouts_of(path, step) if step > 0 else []
        attempts = {part.instance_id: run.index.attempts(part.instance_id) for part in parts}
        grades = {(row.instance_id, row.attempt): row for rows in attempts.values() for row in rows}
        plan, rewards = plan_of(path), points_of.get("reward", [])
        mixes = run.index.mixes(plan.width) if plan else []
        return self.render(
            "training.html", title=f"{path.name}: training", run=run, path=path, step=max(0, step), curves=drawn,
            parts_of_step=parts, grades=grades, plan=plan, mixes=mixes, rewards={int(x): y for x, y in rewards},
            rise=rise_of(rewards, mixes), in_doubt=run.index.rows(Filter(doubt="any", sort="newest"), 5),
            counts=run.index.counts("doubt", Filter()),
        )  # fmt: skip

    def rollout(
        self, key: str, instance_id: str, attempt: int, template: str = "rollout.html", anchor: str = ""
    ) -> str:
        """Render a rollout, whose fragments begin with ``anchor``."""
        run = self.site.run(key)
        trajectory, replayed = self._replayed(run, instance_id, attempt)
        before, after = run.index.neighbours(instance_id, attempt)
        return self.render(
            template, title=f"{instance_id}#{attempt}", run=run, trajectory=trajectory, turns=turns_of(trajectory),
            tests=tests_by_outcome(trajectory), verdict=verdict_of(trajectory), before=before, after=after,
            stages=_stages(trajectory), timings=asdict(trajectory.timings), anchor=anchor, replayed=replayed,
            doubt=_doubt(trajectory), failures=failure_lines(trajectory.grade.log) if trajectory.grade else [],
        )  # fmt: skip

    def replay(self, key: str, instance_id: str, attempt: int) -> None:
        """Run a rollout's commands again, for the diffs of its turns; one replay at a time."""
        trajectory = trajectory_of(self.site.run(key).index, instance_id, attempt)
        with self._replaying:
            self._replays[key, instance_id, attempt] = asyncio.run(replay_patches(trajectory, Store.open()))

    def _replayed(self, run: Run, instance_id: str, attempt: int) -> tuple[Trajectory, Replay | None]:
        """Return a rollout, with the diffs of its replay if there was one."""
        trajectory = trajectory_of(run.index, instance_id, attempt)
        replayed = self._replays.get((run.key, instance_id, attempt))
        return replace(trajectory, patches=replayed.patches) if replayed else trajectory, replayed

    def tokens(self, key: str, instance_id: str, attempt: int, number: int, start: int) -> str:
        """Render a part of a row of tokens."""
        run = self.site.run(key)
        trajectory = trajectory_of(run.index, instance_id, attempt)
        if not 0 <= number < len(trajectory.rows) or not 0 <= start < len(trajectory.rows[number].ids):
            raise NotFound(f"{instance_id}#{attempt} has no such tokens")
        row = trajectory.rows[number]
        return self.render(
            "tokens.html", title=f"{instance_id}#{attempt}: tokens", run=run, trajectory=trajectory, row=row,
            number=number, start=start, spans=token_spans(row, start, self.site.tokenizer), length=len(row.ids),
            page=TOKENS, has_text=self.site.tokenizer is not None,
        )  # fmt: skip

    def raw(self, key: str, instance_id: str, attempt: int, part: str) -> str:
        """Return a text of a rollout, with escapes.

        Args:
            key: the run.
            instance_id: the task's id.
            attempt: the rollout's number.
            part: ``message N``, ``stdout N``, ``stderr N``, ``turn N`` (its patch), ``patch``, ``log`` or ``tests``.
        """
        trajectory, _ = self._replayed(self.site.run(key), instance_id, attempt)
        kind, _, text = part.partition(" ")
        index = int(text) if text.isdecimal() and len(text) < 9 else 0
        grade = trajectory.grade
        readers: Mapping[str, Callable[[], str | bytes]] = {
            "message": lambda: trajectory.messages[index].content,
            "stdout": lambda: trajectory.steps[index].stdout,
            "stderr": lambda: trajectory.steps[index].stderr,
            "turn": lambda: (record.patch or b"") if (record := trajectory.patch_after(index)) else b"",
            "patch": lambda: trajectory.submission or b"",
            "log": lambda: grade.log if grade else "",
            "tests": lambda: "\n".join(f"{outcome:12} {test}" for test, outcome in (grade.outcomes if grade else ())),
        }
        try:
            content = readers[kind]()
        except LookupError:
            raise NotFound(f"{instance_id}#{attempt} has no {part!r}") from None
        return visible(content if isinstance(content, str) else content.decode("utf-8", "backslashreplace"))


def trajectory_of(index: RunIndex, instance_id: str, attempt: int) -> Trajectory:
    """Return a rollout's record.

    Raises:
        NotFound: there is no such rollout.
    """
    trajectory = index.trajectory(instance_id, attempt)
    if trajectory is None:
        raise NotFound(f"there is no rollout {instance_id}#{attempt}")
    return trajectory


def verdict_of(trajectory: Trajectory) -> tuple[str, str]:
    """Return a heading and a sentence on whether the grade is believed, and why."""
    grade, failure = trajectory.grade, trajectory.failure
    if failure is not None:
        return f"No reward: infrastructure error in {failure.phase}", f"{failure.kind}: {failure.detail}"
    if grade is None:
        return "Not graded", trajectory.detail
    failed = len(grade.failed_fail_to_pass) + len(grade.failed_pass_to_pass)
    if grade.judged and failed:
        return f"Failed: {failed:,} of {len(grade.outcomes):,} named tests did not pass", grade.detail
    heading = _HEADINGS.get(grade.verdict, str(grade.verdict).replace("_", " ").capitalize())
    if grade.verdict is Verdict.FAILED:
        heading += ": no test passed" if grade.judged else ": the tests have no result that is believed"
    return heading, grade.detail


def _stages(trajectory: Trajectory) -> dict[str, float]:
    timings = trajectory.timings
    return {
        "sandbox": timings.sandbox_ready, "model": timings.model, "commands": timings.commands,
        "agent": max(0.0, timings.agent - timings.model - timings.commands), "patch": timings.patch,
        "grade": timings.grade,
    }  # fmt: skip


def _explained(kinds: str) -> str:
    """Return the kinds of flags of a submission as a sentence."""
    names = [kind.removeprefix("suspicious: ") for kind in kinds.split(", ") if kind]
    return "; ".join(_FLAGS.get(name, name.replace("_", " ")) for name in names)


def _doubt(trajectory: Trajectory) -> str:
    """Return the kind of doubt about a rollout's grade, or ""; as in the index."""
    grade = trajectory.grade
    if grade is None or trajectory.failure is not None:
        return ""
    is_suspicious = any(flag.kind.startswith("suspicious: ") for flag in grade.flags)
    kinds = {Verdict.TAMPERED: "tampered", Verdict.UNCONFIRMED: "not confirmed"}
    return kinds.get(grade.verdict, "suspicious pass" if grade.verdict is Verdict.RESOLVED and is_suspicious else "")


def _by_level(tasks: Sequence[TaskRow]) -> dict[str, list[TaskRow]]:
    return {level: [task for task in tasks if task.level == level] for level in LEVELS}


def _left(totals: Totals, expected: int) -> float | None:
    """Return the estimated seconds until a run has its expected number of rollouts; None if it has them or is still."""
    if not totals.first or not totals.last or not 0 < totals.rollouts < expected:
        return None
    first, last = (datetime.fromisoformat(text) for text in (totals.first, totals.last))
    if time.time() - last.timestamp() > _STILL:
        return None
    return (last - first).total_seconds() / totals.rollouts * (expected - totals.rollouts)


def _paired(counts: Sequence[list[tuple[str, int, float | None]]]) -> list[tuple[str, int, int]]:
    """Return the values of two lists of counts with both counts, most frequent first."""
    first, second = ({value: count for value, count, _ in rows} for rows in counts)
    pairs = [(value, first.get(value, 0), second.get(value, 0)) for value in first | second]
    return sorted(pairs, key=lambda pair: -pair[1] - pair[2])


def _statement(trajectory: Trajectory) -> str:
    """Return the task as the agent read it: the user's messages before the first response."""
    first = next((turn.message for turn in trajectory.turns), len(trajectory.messages))
    return "\n\n".join(message.content for message in trajectory.messages[:first] if message.role == "user")


class Change(NamedTuple):
    """A task whose mean reward differs between two runs; ``change`` is None if a run has no mean."""

    instance_id: str
    first: TaskRow | None
    second: TaskRow | None
    change: float | None


def _changes(first: Mapping[str, TaskRow], second: Mapping[str, TaskRow]) -> list[Change]:
    """Return the tasks whose mean rewards differ between two runs: the largest loss first, then gains."""
    changes = []
    for name in first.keys() | second.keys():
        rows = first.get(name), second.get(name)
        before, after = (row.reward if row else None for row in rows)
        if before != after:
            change = None if before is None or after is None else after - before
            changes.append(Change(name, *rows, change))
    return sorted(changes, key=lambda row: (row.change is None, row.change or 0.0, row.instance_id))


# --- formats of values -----------------------------------------------------------------------------------------------


def _shown(value: object) -> object:
    """Make every printed value of a template harmless, before Jinja escapes it for HTML."""
    return value if isinstance(value, Markup) else visible("" if value is None else str(value))


def duration(seconds: float) -> str:
    """Return a duration for reading: ``12 ms``, ``3.4 s``, ``5.0 min``, ``40 min``, ``2.1 h``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def number(value: float) -> str:
    """Return a number with separators of thousands."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def percent(value: float | None) -> str:
    """Return a proportion as a percentage, or a dash for None."""
    return _NOTHING if value is None or math.isnan(value) else f"{100 * value:.1f} %".replace(".0 %", " %")


def rate(totals: Totals) -> Markup:
    """Draw a mean reward with its interval."""
    return Markup() if totals.reward is None else charts.interval(totals.reward, totals.interval)


def when(text: str | None) -> str:
    """Return a time of the database for reading, in UTC."""
    try:
        return datetime.fromisoformat(text or "").strftime("%d %b %Y, %H:%M")
    except ValueError:
        return text or _NOTHING


def tone(row: Row | Trajectory | str) -> str:
    """Return the class that colours an outcome: ``good``, ``bad``, ``doubt`` or ``broken``."""
    if isinstance(row, Trajectory):
        row = "failed in" if row.failure else str(row.grade.verdict) if row.grade else "not graded"
    outcome = row if isinstance(row, str) else row.outcome
    return "broken" if outcome.startswith("failed in") else _TONES.get(outcome, "bad")
