"""``minisandbox quickstart``: build and validate the bundled tasks, run agents on them, and print the verdicts."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import minisandbox
from minisandbox.agents import Agent, EmptyAgent, OracleAgent
from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import (
    Progress,
    Repeats,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    raise_failures,
    require_positive,
)
from minisandbox.cli.common.set_runs import show_progress
from minisandbox.cli.common.task_sets import add_only_option
from minisandbox.cli.rollout_display import Display
from minisandbox.cli.tasks.verbs import DEFAULT
from minisandbox.cli.validate import detail, line
from minisandbox.errors import HostError
from minisandbox.grade import Validated, Verdict, run_validations
from minisandbox.host import doctor
from minisandbox.images import Image, ImageSize, image_sizes, total_size
from minisandbox.rollouts import Budgets, Setup, Summary, load_replay, run_batch
from minisandbox.store import Store, default_root
from minisandbox.tasks import Task, TaskSet
from minisandbox.values import human_size

_MAX_WORKERS = 8  # more workers would wait for the disk
_AGENTS = ("oracle", "empty", "replay")
_KEPT_SECONDS = 86400.0  # seconds to keep an outdated directory, because another quickstart may still use it


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    add_only_option(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: one per core, 8 at most)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="trajectories' directory (default: in the store)")
    parser.add_argument(
        "--fresh", action="store_true", help="repeat all rollouts, including finished ones of an earlier run"
    )
    add_json_option(parser)
    parser.set_defaults(run=run, kept="finished layers and rollouts are kept; the same command resumes")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The results of one task.

    Attributes:
        task: id of the task.
        built_in: build time of new layers in seconds; 0.0 if no layer was built.
        size: size of the task's image.
        sandbox_ready: seconds until a sandbox accepted commands, the median over the rollouts.
        validation: result of the validation.
        rollouts: the task's rollouts, by agent.
        problems: differences from the expected results.
    """

    task: str
    built_in: float
    size: ImageSize
    sandbox_ready: float
    validation: Validated
    rollouts: Mapping[str, Summary]
    problems: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """Run the whole quickstart; return 0 if all verdicts are as expected, otherwise 1."""
    began = time.monotonic()
    require_positive(args, "workers")
    checks = doctor.run_checks(default_root())
    reason = doctor.explain("sandbox", checks) or doctor.explain("images", checks)
    if reason is not None:
        raise HostError(
            "this machine cannot make sandboxes", reason=reason, hint="run minisandbox doctor for all checks"
        )
    tasks = TaskSet.load(DEFAULT)
    tasks = tasks.select(args.only) if args.only else tasks
    workers = args.workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    with Progress() as progress:
        builder = Builder(Store.open(), progress)
        images = builder.build_all(tasks, workers)
        out = args.out or _run_directory(builder.store, tasks, images)
        if args.fresh:
            _forget_rollouts(out)
        rows = _check_all([task for task in tasks if task.instance_id in images], builder, out, workers)
    if rows or args.json:
        _report(Quickstart(tuple(rows), len(tasks), tuple(images.values()), out, time.monotonic() - began), args.json)
    raise_failures(builder.failures)
    return exits.NEGATIVE if any(row.problems for row in rows) else exits.OK


def _run_directory(store: Store, tasks: TaskSet, images: Mapping[str, Image]) -> Path:
    """Return the directory for the rollouts, named by a hash of all inputs so that outdated rollouts are not resumed.

    Also remove directories of other selections, images or versions a day after their last use.
    """
    digest = hashlib.sha256(tasks.to_jsonl().encode("utf-8", "surrogatepass"))
    digest.update(json.dumps(sorted(image.key for image in images.values())).encode())
    for source in sorted(Path(minisandbox.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    runs = store.root / "runs"
    directory = runs / f"quickstart-{digest.hexdigest()[:16]}"
    for other in runs.glob("quickstart-*"):
        last_use = max(path.stat().st_mtime for path in (other, *other.iterdir()))
        if other != directory and time.time() - last_use > _KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return directory


def _forget_rollouts(out: Path) -> None:
    """Remove the runs of an earlier quickstart, but no other files, because the user may have chosen the directory."""
    for agent in _AGENTS:
        if (out / agent / "run.json").is_file():
            shutil.rmtree(out / agent)


def _check_all(tasks: Sequence[Task], builder: Builder, out: Path, workers: int) -> list[TaskResult]:
    """Validate the tasks and run the rollouts; a failure in one task does not affect the others."""
    validations = run_validations(
        tasks, builder.image_of, workers=workers, progress=lambda event: show_progress(builder.progress, event, line)
    )
    validation_of = {validation.instance_id: validation for validation in validations}
    rollouts = {"oracle": _rollouts(tasks, OracleAgent(), out / "oracle", builder, workers)}
    rollouts["empty"] = _rollouts(tasks, EmptyAgent(), out / "empty", builder, workers)
    # Replay the oracle's recorded rollouts, which must lead to the same verdicts.
    rollouts["replay"] = _rollouts(tasks, load_replay(out / "oracle"), out / "replay", builder, workers)
    sizes = image_sizes([builder.image_of(task) for task in tasks])
    return [
        _row(
            task,
            builder,
            sizes[task.instance_id],
            validation_of[task.instance_id],
            {agent: summaries[task.instance_id] for agent, summaries in rollouts.items()},
        )
        for task in tasks
    ]


def _rollouts(tasks: Sequence[Task], agent: Agent, out: Path, builder: Builder, workers: int) -> dict[str, Summary]:
    summaries = run_batch(
        tasks,
        Setup(agent=agent),
        out,
        image_of=builder.image_of,
        budgets=Budgets(workers=workers),
        config={"tasks": DEFAULT},
        progress=Display(builder.progress, agent.name, quiet=False).record,
        notice=builder.progress.note,
    )
    return {summary.instance_id: summary for summary in summaries}


def _row(
    task: Task, builder: Builder, size: ImageSize, validation: Validated, rollouts: Mapping[str, Summary]
) -> TaskResult:
    name = task.instance_id
    ready_seconds = sorted(summary.timings.sandbox_ready for summary in rollouts.values())
    return TaskResult(
        name,
        builder.seconds[name],
        size,
        ready_seconds[len(ready_seconds) // 2],
        validation,
        rollouts,
        tuple(_problems(validation, rollouts)),
    )


def _problems(validation: Validated, rollouts: Mapping[str, Summary]) -> Sequence[str]:
    expected = {"oracle": Verdict.RESOLVED, "empty": Verdict.FAILED, "replay": rollouts["oracle"].verdict}
    problems = [] if validation.valid else [f"the task is {validation.status}: {detail(validation)}"]
    problems += [
        f"{agent} is {summary.verdict or 'not graded'}, not {expected[agent]}: {summary.detail}"
        for agent, summary in rollouts.items()
        if summary.verdict is None or summary.verdict is not expected[agent]
    ]
    return problems


# --- printed output -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quickstart:
    """The printed results.

    Attributes:
        rows: results of the tasks that have an image.
        tasks: number of all tasks.
        images: images of the tasks.
        out: directory of the trajectories.
        seconds: total wall time in seconds.
    """

    rows: tuple[TaskResult, ...]
    tasks: int
    images: tuple[Image, ...]
    out: Path
    seconds: float

    @property
    def as_expected(self) -> int:
        """The number of tasks with the expected results."""
        return sum(not row.problems for row in self.rows)

    @property
    def resumed(self) -> int:
        """The number of rollouts that were resumed from an earlier run."""
        return sum(summary.resumed for row in self.rows for summary in row.rollouts.values())


def _report(report: Quickstart, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "seconds": report.seconds,
                "as_expected": report.as_expected,
                "resumed": report.resumed,
                "disk_bytes": total_size(report.images),
                "run": report.out,
                "tasks": [_plain_row(row) for row in report.rows],
            }
        )
        return
    numbers = ("built in", "shared", "unique", "ready in")
    titles = ("task", *numbers, "task is", *_AGENTS, "result")
    print_table(titles, [_cells(row) for row in report.rows], numbers=numbers, unwrapped=titles)
    repeats = Repeats()
    for row in report.rows:
        for problem in row.problems:
            put(f"\n{row.task}: {repeats.once(row.task, problem)}")
    disk, rollout_count = human_size(total_size(report.images)), sum(len(row.rollouts) for row in report.rows)
    put(f"\n{report.as_expected} of {report.tasks} tasks as expected; images take {disk} in total")
    resumed = f", {report.resumed} of them from an earlier run (--fresh repeats them)" if report.resumed else ""
    put(f"{rollout_count} rollouts{resumed}; {human_seconds(report.seconds)} in total")
    put(f"trajectories: {report.out}")


def _cells(row: TaskResult) -> tuple[str, ...]:
    build_time = human_seconds(row.built_in) if row.built_in else "cached"
    sizes = human_size(row.size.shared), human_size(row.size.unique)
    verdicts = (row.rollouts[agent].verdict or "none" for agent in _AGENTS)
    result = "NOT as expected" if row.problems else "as expected"
    return (row.task, build_time, *sizes, human_seconds(row.sandbox_ready), row.validation.status, *verdicts, result)


def _plain_row(row: TaskResult) -> dict[str, object]:
    return {
        "instance_id": row.task,
        "built_in": row.built_in,
        "shared_bytes": row.size.shared,
        "unique_bytes": row.size.unique,
        "sandbox_ready": row.sandbox_ready,
        "status": row.validation.status,
        "verdicts": {agent: summary.verdict for agent, summary in row.rollouts.items()},
        "problems": row.problems,
    }
