"""``minisandbox tasks check``: find faults of a task set before anybody trains on it."""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Column,
    Progress,
    add_json_option,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.common.task_sets import add_tasks_arguments, load
from minisandbox.errors import GradingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minisandbox.cli.common.builds import Builder
    from minisandbox.grade import Progress as News
    from minisandbox.grade.check import Checked, Finding
    from minisandbox.images import Budget
    from minisandbox.tasks import Task
    from minisandbox.tasks.loading import Refused

_MOST = 10
"""Findings of one check that are printed; the reports have all."""


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    check = verbs.add_parser(
        "check",
        help="find leaks, wrong tests, flakiness, duplicates and other faults of tasks",
        description="Find faults of tasks before anybody trains on them: leaks, wrong lists of tests, flakiness, "
        "verifiers that an agent can change, slow tests, duplicates. docs/how-to/check-a-task-set.md lists the checks.",
    )
    add_tasks_arguments(check)
    check.add_argument("--static", action="store_true", help="check rows alone: build nothing, run nothing")
    check.add_argument(
        "-k", "--repeat", type=int, default=2, metavar="K",
        help="runs of the reference, and of the untouched code (default: 2)",
    )  # fmt: skip
    check.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of one run of a task's tests")
    check.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="directory for results and reports; an existing one is resumed"
    )
    check.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: one per CPU)")
    check.add_argument("--jobs", type=int, metavar="N", help="build steps at once (default: one per CPU)")
    add_json_option(check)
    kept = "finished layers are kept, and with -o finished tasks; the same command resumes"
    check.set_defaults(run=run, kept=kept)


def run(args: argparse.Namespace) -> int:
    """Check tasks; return 0 without errors, 1 if a task has one, 30 if one could not be checked."""
    from minisandbox.cli.common.builds import Builder  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.cli.validate import cpus, estimate  # noqa: PLC0415 - the same
    from minisandbox.grade import DATABASE  # noqa: PLC0415 - the same
    from minisandbox.grade.check import CHECKS, Severity, check_set  # noqa: PLC0415 - the same
    from minisandbox.grade.check import report as reports  # noqa: PLC0415 - the same
    from minisandbox.images import Budget  # noqa: PLC0415 - the same
    from minisandbox.store import Store  # noqa: PLC0415 - the same

    require_positive(args, "repeat", "timeout", "workers", "jobs")
    refused: list[Refused] = []
    tasks = tuple(load(args, refused.append))
    # on resume, builds that failed in this run are not retried
    retry = args.out is None or not (args.out / DATABASE).exists()
    with Progress() as progress:
        builder = None if args.static else Builder(Store.open(), progress, args.repo_mirrors)
        checked = check_set(
            tasks,
            None if builder is None else builder.image_of,
            refused=() if args.only else refused,
            out=args.out,
            repeat=args.repeat,
            workers=args.workers or cpus(),
            timeout=args.timeout,
            build=None if builder is None else partial(_build, builder, Budget(jobs=args.jobs or cpus()), retry),
            progress=partial(_show_progress, progress, estimate),
        )
    found = reports.all_findings(checked)
    if args.out is not None:
        reports.write_check_reports(args.out, checked)
    if args.json:
        print_json(reports.check_report(checked))
    else:
        _print(found, {name: check.advice for name, check in CHECKS.items()}, reports.about)
        put(reports.summary(checked) + (f"; report in {args.out}" if args.out is not None else ""))
    if any(one.check == "infrastructure" for one in found):
        return GradingError.exit_code
    return exits.NEGATIVE if any(one.severity is Severity.ERROR for one in found) else exits.OK


def _build(builder: Builder, budget: Budget, retry: bool, tasks: Sequence[Task]) -> None:
    builder.build_recipes({task.instance_id: task.recipe for task in tasks}, budget, retry_failed=retry)


def _show_progress(progress: Progress, estimate: Callable[[float | None], str], news: News[Checked]) -> None:
    one = news.latest
    if not news.resumed:
        found = ", ".join(dict.fromkeys(finding.check for finding in one.findings))
        progress.note(f"{news.done}/{news.total} {one.instance_id}: {found or 'ok'} ({one.seconds:.1f} s)")
    progress.status(f"{news.done} of {news.total} tasks{estimate(news.seconds_left)}")


def _print(found: Sequence[Finding], advice: Mapping[str, str], about: Callable[[Finding], str]) -> None:
    checks: dict[str, list[Finding]] = defaultdict(list)
    for one in found:
        checks[one.check].append(one)
    if not checks:
        return
    columns = (Column("task", whole=True), Column("severity"), Column("check"), Column("finding"))
    shown = [one for those in checks.values() for one in those[:_MOST]]
    print_table(columns, [(one.task, one.severity, one.check, about(one)) for one in shown])
    for name, those in checks.items():
        more = f" ({len(those) - _MOST} more)" if len(those) > _MOST else ""
        put(f"\n{name}{more}: {advice[name]}", end="")
    put("\n")
