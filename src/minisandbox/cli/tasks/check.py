"""``minisandbox tasks check``: find faults of a task set before anybody trains on it."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Column,
    Once,
    Progress,
    Repeats,
    add_json_option,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.common.task_sets import add_run_arguments, add_tasks_arguments, load
from minisandbox.errors import GradingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minisandbox.grade.check import Checked, Finding
    from minisandbox.tasks.loading import Refused

_MOST = 10
_NO_RESULT = ("not_built", "infrastructure")
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
    add_run_arguments(check)
    add_json_option(check)
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check tasks; return 0 without errors, 1 if a task has one, 30 if one could not be checked."""
    from minisandbox.cli.common.set_runs import SetRun, show_progress  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.grade.check import CHECKS, Severity, check_set  # noqa: PLC0415 - the same
    from minisandbox.grade.check import report as reports  # noqa: PLC0415 - the same

    require_positive(args, "repeat", "timeout", "workers", "jobs")
    refused: list[Refused] = []
    tasks = tuple(load(args, refused.append))
    with Progress() as progress:
        work = SetRun(args, progress, here=not args.static)
        checked = check_set(
            tasks,
            work.image_of,
            refused=() if args.only else refused,
            out=args.out,
            repeat=args.repeat,
            workers=work.workers,
            timeout=args.timeout,
            build=work.build,
            progress=lambda news: show_progress(progress, news, _line),
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


def _line(one: Checked, _: Once) -> str:
    found = ", ".join(dict.fromkeys(finding.check for finding in one.findings))
    return f"{one.instance_id}: {found or 'ok'} ({one.seconds:.1f} s)"


def _print(found: Sequence[Finding], advice: Mapping[str, str], about: Callable[[Finding], str]) -> None:
    checks: dict[str, list[Finding]] = defaultdict(list)
    for one in found:
        checks[one.check].append(one)
    if not checks:
        return
    columns = (Column("task", whole=True), Column("severity"), Column("check"), Column("finding"))
    shown = [one for those in checks.values() for one in those[:_MOST]]
    once = Repeats().once
    rows = [
        (one.task, one.severity, one.check, once(one.task, about(one)) if one.check in _NO_RESULT else about(one))
        for one in shown
    ]
    print_table(columns, rows)
    for name, those in checks.items():
        more = f" ({len(those) - _MOST} more)" if len(those) > _MOST else ""
        put(f"\n{name}{more}: {advice[name]}", end="")
    put("\n")
