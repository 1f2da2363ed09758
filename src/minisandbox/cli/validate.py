"""``minisandbox validate``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.builds import Builder
from minisandbox.cli.cluster_options import add_cluster_argument, print_nodes
from minisandbox.cli.output import (
    Column,
    Progress,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.task_sets import add_tasks_arguments, load
from minisandbox.errors import GradingError, InvalidValue
from minisandbox.grade import DATABASE, Status, Validated, run_validations, validation_report, write_validation_reports
from minisandbox.grade import Progress as News
from minisandbox.images import Budget
from minisandbox.rollouts.cluster import Cluster, ClusterChecks
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tasks_arguments(parser)
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="how often, to find tests that waver (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="what one run of tests may take (default: the task's)"
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="the run's directory: results and reports; the same one goes on"
    )
    parser.add_argument(
        "--only-failed", action="store_true", help="validate again what DIR says is not valid, and nothing else"
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="build images anew and validate again, whatever is there"
    )
    add_work_arguments(parser)
    add_json_option(parser)
    kept = "finished layers are kept, with -o finished tasks too; the same command goes on"
    parser.set_defaults(run=run, kept=kept)


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how much a command that builds images and runs tests may do at once."""
    parser.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: as many as there are CPUs)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="build steps at once (default: as many as there are CPUs)"
    )
    add_cluster_argument(parser)


def checks_of(args: argparse.Namespace, progress: Progress) -> ClusterChecks | None:
    """What does the work where ``--cluster`` says so; None for this machine."""
    if args.cluster is None:
        return None
    return ClusterChecks(Cluster(address=args.cluster, mirrors=args.repo_mirrors, notice=progress.note), args.workers)


def load_both(args: argparse.Namespace) -> tuple[TaskSet, TaskSet]:
    """Read the whole set, and say which of it ``--only`` chooses."""
    everything = load(argparse.Namespace(**{**vars(args), "only": []}))
    return everything, everything.select(args.only) if args.only else everything


def cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def run(args: argparse.Namespace) -> int:
    """Validate tasks: 0 if all are valid, 1 if one is not, 30 if we could not find out about one."""
    require_positive(args, "runs", "workers", "jobs", "timeout")
    if args.rebuild and args.cluster is not None:
        raise InvalidValue("--rebuild is about this machine's store", hint="minisandbox image rm, on each node")
    if args.only_failed and args.out is None:
        raise InvalidValue("--only-failed goes by what a run directory says", hint="--only-failed -o DIR")
    tasks, selected = load_both(args)
    chosen = frozenset(selected.ids)
    # builds that failed in this very run are not tried again unasked
    retry = args.rebuild or args.only_failed or args.out is None or not (args.out / DATABASE).exists()
    with Progress() as progress:
        checks = checks_of(args, progress)
        builder = Builder(Store.open(), progress, args.repo_mirrors) if checks is None else None
        found = run_validations(
            tasks,
            None if builder is None else builder.image_of,
            out=args.out,
            only=chosen,
            only_failed=args.only_failed,
            again=args.rebuild,
            runs=args.runs,
            workers=args.workers or cpus(),
            timeout=args.timeout,
            config={"tasks": args.tasks},
            build=None if builder is None else lambda some: _build(builder, some, args, retry),
            progress=lambda news: _tell(progress, news),
            elsewhere=checks,
        )
    if args.out is not None:
        write_validation_reports(args.out, found, len(tasks))
    asked = [one for one in found if one.instance_id in chosen]
    _print(args, found, asked, len(tasks))
    if checks is not None and not args.json:
        print_nodes(checks.reports)
    return status_of(asked)


def _build(builder: Builder, tasks: Sequence[Task], args: argparse.Namespace, retry: bool) -> None:
    if args.rebuild:
        builder.forget(task.instance_id for task in tasks)
    recipes = {task.instance_id: task.recipe for task in tasks}
    builder.build_recipes(recipes, Budget(jobs=args.jobs or cpus()), retry_failed=retry)


def validate_all(tasks: Sequence[Task], builder: Builder, *, workers: int = 1) -> tuple[Validated, ...]:
    """Validate tasks, several at once, and keep nothing.

    Args:
        tasks: the tasks.
        builder: where their images come from.
        workers: tasks at once.

    Returns:
        What was found, task by task; what cannot be built or run is a result with the status ``error``.
    """
    return run_validations(
        tasks, builder.image_of, workers=workers, progress=lambda news: _tell(builder.progress, news)
    )


def _tell(progress: Progress, news: News[Validated]) -> None:
    """Tell of a task that has ended, and of how long the rest will take."""
    one = news.latest
    if not news.resumed:
        said = f": {detail(one)}" if detail(one) else ""
        progress.note(f"{news.done}/{news.total} {one.instance_id}: {one.status}{said}")
    progress.status(f"{news.done} of {news.total} tasks{estimate(news.seconds_left)}")


def estimate(seconds_left: float | None) -> str:
    """How long it will take, as the end of a sentence."""
    return "" if not seconds_left else f"; about {human_seconds(max(seconds_left, 1.0))} left"


def status_of(found: Sequence[Validated]) -> int:
    """The exit status that a set of validations deserves."""
    if any(one.status is Status.ERROR for one in found):
        return GradingError.exit_code
    return exits.OK if all(one.valid for one in found) else exits.NEGATIVE


def detail(found: Validated) -> str:
    """What was found in a line, with the first of the tests it is about; of a valid task its notes."""
    if found.valid:
        return "; ".join(f"note: {note}" for note in found.notes)
    tests = f" ({found.tests[0]}{', ...' if len(found.tests) > 1 else ''})" if found.tests else ""
    return found.detail + tests


def _print(args: argparse.Namespace, found: Sequence[Validated], selected: Sequence[Validated], total: int) -> None:
    if args.json:
        print_json([_summary(one) for one in selected] if args.out is None else validation_report(found, total))
        return
    print_table(
        (
            Column("task", whole=True),
            Column("status"),
            Column("cause"),
            Column("detail"),
            Column("seconds", number=True),
        ),
        [(one.instance_id, one.status, one.cause or "", detail(one), f"{one.seconds:.1f}") for one in selected],
    )
    if args.out is not None:
        valid = sum(one.valid for one in found)
        put(f"\n{valid} of {total} tasks are valid; {args.out} has the report")


def _summary(found: Validated) -> dict[str, object]:
    return {
        "instance_id": found.instance_id,
        "status": found.status,
        "cause": found.cause,
        "detail": found.detail,
        "tests": found.tests,
        "flaky": found.flaky,
        "notes": found.notes,
        "seconds": found.seconds,
    }
