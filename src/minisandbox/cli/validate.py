"""``minisandbox validate``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from minisandbox.cli import exits
from minisandbox.cli.builds import Builder
from minisandbox.cli.image import KEPT
from minisandbox.cli.output import Column, Progress, add_json_option, print_json, print_table, require_positive
from minisandbox.cli.parallel import in_parallel
from minisandbox.cli.task_sets import add_tasks_arguments, load
from minisandbox.errors import GradingError, MiniSandboxError
from minisandbox.grade import Cause, Status, Validation, validate
from minisandbox.store import Store
from minisandbox.tasks import Task


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tasks_arguments(parser)
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="how often, to find tests that waver (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="what one run of tests may take (default: the task's)"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="tasks at once (default: 1)")
    add_json_option(parser)
    parser.set_defaults(run=run, kept=KEPT)


def run(args: argparse.Namespace) -> int:
    """Validate tasks: 0 if all are valid, 1 if one is not, 30 if we could not find out about one."""
    require_positive(args, "runs", "workers", "timeout")
    with Progress() as progress:
        builder = Builder(Store.open(), progress, args.repo_mirrors)
        found = validate_all(list(load(args)), builder, runs=args.runs, timeout=args.timeout, workers=args.workers)
    if args.json:
        print_json([_summary(one) for one in found])
    else:
        print_table(
            (
                Column("task", whole=True),
                Column("status"),
                Column("cause"),
                Column("detail"),
                Column("seconds", number=True),
            ),
            [(one.instance_id, one.status, one.cause or "", detail(one), f"{seconds(one):.1f}") for one in found],
        )
    return status_of(found)


def validate_all(
    tasks: Sequence[Task], builder: Builder, *, runs: int = 1, timeout: float | None = None, workers: int = 1
) -> list[Validation]:
    """Validate tasks, several at once; what cannot be built or run is a result with the status ``error``.

    Args:
        tasks: the tasks.
        builder: where their images come from.
        runs: how often each is run.
        timeout: seconds that a run of tests may take; the task's own if None.
        workers: tasks at once.

    Returns:
        What was found, task by task.
    """

    def one(task: Task) -> Validation:
        builder.progress.status(f"{task.instance_id}: validating")
        try:
            found = validate(task, builder.image_of(task), runs=runs, timeout=timeout)
        except MiniSandboxError as error:
            found = Validation(task.instance_id, Status.ERROR, Cause.INFRASTRUCTURE, f"{type(error).__name__}: {error}")
        builder.progress.note(f"{task.instance_id}: {found.status}" + (f": {detail(found)}" if found.detail else ""))
        return found

    return in_parallel(one, tasks, workers)


def status_of(found: Sequence[Validation]) -> int:
    """The exit status that a set of validations deserves."""
    if any(one.status is Status.ERROR for one in found):
        return GradingError.exit_code
    return exits.OK if all(one.valid for one in found) else exits.NEGATIVE


def detail(found: Validation) -> str:
    """What was found in a line, with the first of the tests it is about."""
    tests = f" ({found.tests[0]}{', ...' if len(found.tests) > 1 else ''})" if found.tests else ""
    return found.detail + tests


def seconds(found: Validation) -> float:
    """What the runs of tests took together."""
    return sum(grade.duration for grade in found.reference) + sum(run.duration for run in found.empty)


def _summary(found: Validation) -> dict[str, object]:
    return {
        "instance_id": found.instance_id,
        "status": found.status,
        "cause": found.cause,
        "detail": found.detail,
        "tests": found.tests,
        "seconds": seconds(found),
    }
