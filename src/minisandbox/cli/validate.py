"""``minisandbox validate``: check that tasks can be used."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.backends import add_backend_argument, backend_config, backend_of
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.cluster_options import add_cluster_argument, print_nodes
from minisandbox.cli.common.grading_options import add_grading_arguments, grading_options
from minisandbox.cli.common.output import (
    Column,
    Progress,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.common.task_sets import add_tasks_arguments, load
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
        "--runs", type=int, default=1, metavar="N", help="repetitions, to find flaky tests (default: 1)"
    )
    add_grading_arguments(parser)
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="directory for results and reports; an existing one is resumed"
    )
    parser.add_argument("--only-failed", action="store_true", help="repeat only the tasks in DIR that are not valid")
    parser.add_argument("--rebuild", action="store_true", help="rebuild the images and repeat all validations")
    add_work_arguments(parser)
    add_json_option(parser)
    kept = "finished layers are kept, and with -o finished tasks; the same command resumes"
    parser.set_defaults(run=run, kept=kept)


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the concurrency of a command that builds images and runs tests."""
    parser.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: one per CPU)")
    parser.add_argument("--jobs", type=int, metavar="N", help="build steps at once (default: one per CPU)")
    add_backend_argument(parser)
    add_cluster_argument(parser)


def cluster_checks(args: argparse.Namespace, progress: Progress) -> ClusterChecks | None:
    """Return the checks that ``--cluster`` runs on its nodes; None for this machine."""
    if args.cluster is None:
        return None
    return ClusterChecks(Cluster(address=args.cluster, mirrors=args.repo_mirrors, notice=progress.note), args.workers)


def load_both(args: argparse.Namespace) -> tuple[TaskSet, TaskSet]:
    """Return the whole set, and the part selected by ``--only``."""
    everything = load(argparse.Namespace(**{**vars(args), "only": []}))
    return everything, everything.select(args.only) if args.only else everything


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def run(args: argparse.Namespace) -> int:
    """Validate tasks; return 0 if all are valid, 1 if one is not, 30 after an infrastructure error."""
    require_positive(args, "runs", "workers", "jobs")
    grading = grading_options(args)
    if args.rebuild and args.cluster is not None:
        raise InvalidValue(
            "--rebuild and --cluster cannot be combined", hint="run minisandbox image rm on each node instead"
        )
    if args.only_failed and args.out is None:
        raise InvalidValue("--only-failed needs a run's directory", hint="name it: --only-failed -o DIR")
    tasks, selected = load_both(args)
    chosen = frozenset(selected.ids)
    # on resume, builds that failed in this run are not retried
    retry = args.rebuild or args.only_failed or args.out is None or not (args.out / DATABASE).exists()
    with Progress() as progress:
        checks = cluster_checks(args, progress)
        builder = Builder(Store.open(), progress, args.repo_mirrors, backend_of(args)) if checks is None else None
        found = run_validations(
            tasks,
            None if builder is None else builder.image_of,
            out=args.out,
            only=chosen,
            only_failed=args.only_failed,
            again=args.rebuild,
            runs=args.runs,
            workers=args.workers or cpus(),
            timeout=grading.timeout,
            confirm=grading.confirm,
            config={"tasks": args.tasks, **backend_config(args)},
            build=None if builder is None else lambda some: _build(builder, some, args, retry),
            progress=lambda news: _show_progress(progress, news),
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
    """Validate tasks without a run directory.

    Args:
        tasks: the tasks.
        builder: builds their images.
        workers: tasks at once.

    Returns:
        The results in the order of the tasks; a task that cannot be built or run has the status ``error``.
    """
    return run_validations(
        tasks, builder.image_of, workers=workers, progress=lambda news: _show_progress(builder.progress, news)
    )


def _show_progress(progress: Progress, news: News[Validated]) -> None:
    """Report a finished task, and the estimated time for the rest."""
    one = news.latest
    if not news.resumed:
        why = f": {detail(one)}" if detail(one) else ""
        progress.note(f"{news.done}/{news.total} {one.instance_id}: {one.status}{why}")
    progress.status(f"{news.done} of {news.total} tasks{estimate(news.seconds_left)}")


def estimate(seconds_left: float | None) -> str:
    """Return the estimated time as the end of a sentence."""
    return "" if not seconds_left else f"; about {human_seconds(max(seconds_left, 1.0))} left"


def status_of(found: Sequence[Validated]) -> int:
    """Return the exit status for a set of validations."""
    if any(one.status is Status.ERROR for one in found):
        return GradingError.exit_code
    return exits.OK if all(one.valid for one in found) else exits.NEGATIVE


def detail(found: Validated) -> str:
    """Return the reason of a result in one line, with the first test it concerns; for a valid task its notes."""
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
        put(f"\n{valid} of {total} tasks are valid; report in {args.out}")


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
