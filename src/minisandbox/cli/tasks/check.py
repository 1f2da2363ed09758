"""``minisandbox tasks check``: find faults of a task set before it is used for training."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
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
    from collections.abc import Sequence

    from minisandbox.grade.check import Checked, Finding
    from minisandbox.tasks.loading import Refused

_MAX_SHOWN = 10  # maximum number of findings to print per check; the reports list all
_NO_RESULT = ("not_built", "infrastructure")


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser."""
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
    """Check tasks; return 0 without errors, 1 if a task has an error, 30 if a task could not be checked."""
    from minisandbox.cli.common.set_runs import SetRun  # noqa: PLC0415 - slow to import
    from minisandbox.grade.check import Severity, check_report, check_set, sets, write_check_reports  # noqa: PLC0415 - slow to import

    require_positive(args, "repeat", "timeout", "workers", "jobs")
    refused: list[Refused] = []
    tasks = tuple(load(args, refused.append))
    with Progress() as progress:
        set_run: SetRun[Checked] = SetRun(args, progress, _line, {}, builds_here=not args.static)
        results = check_set(
            tasks,
            set_run.image_of,
            refused=() if args.only else refused,
            repeat=args.repeat,
            timeout=args.timeout,
            **set_run.options,
        )
    faults = sets.all_findings(results)
    if args.out is not None:
        write_check_reports(args.out, results)
    if args.json:
        print_json(check_report(results))
    else:
        _print(faults)
        put(sets.summary(results) + (f"; report in {args.out}" if args.out is not None else ""))
    if any(finding.check == "infrastructure" for finding in faults):
        return GradingError.exit_code
    return exits.NEGATIVE if any(finding.severity is Severity.ERROR for finding in faults) else exits.OK


def _line(result: Checked, _: Once) -> str:
    checks = ", ".join(dict.fromkeys(finding.check for finding in result.findings))
    return f"{result.instance_id}: {checks or 'ok'} ({result.seconds:.1f} s)"


def _print(faults: Sequence[Finding]) -> None:
    from minisandbox.grade.check import CHECKS, sets  # noqa: PLC0415 - slow to import

    by_check: dict[str, list[Finding]] = defaultdict(list)
    for finding in faults:
        by_check[finding.check].append(finding)
    if not by_check:
        return
    once = Repeats().once
    rows = []
    for finding in (finding for findings in by_check.values() for finding in findings[:_MAX_SHOWN]):
        text = sets.about(finding)
        text = once(finding.task, text) if finding.check in _NO_RESULT else text
        rows.append((finding.task, finding.severity, finding.check, text))
    print_table(("task", "severity", "check", "finding"), rows, unwrapped=["task"])
    for name, findings in by_check.items():
        unprinted = f" ({len(findings) - _MAX_SHOWN} more)" if len(findings) > _MAX_SHOWN else ""
        put(f"\n{name}{unprinted}: {CHECKS[name].advice}", end="")
    put("\n")
