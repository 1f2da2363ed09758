"""``minisandbox validate``: check that tasks can be used."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from minisandbox.cli.common import exits
from minisandbox.cli.common.backends import add_backend_argument, backend_config, backend_of
from minisandbox.cli.common.cluster_options import add_cluster_argument, cluster_checks, print_nodes
from minisandbox.cli.common.grading_options import add_grading_arguments, grading_options
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
from minisandbox.cli.common.set_runs import SetRun, show_progress
from minisandbox.cli.common.task_sets import add_run_arguments, add_tasks_arguments, load_both
from minisandbox.errors import GradingError, InvalidValue
from minisandbox.grade import (
    Kind,
    Status,
    Validated,
    changeable_counts,
    run_validations,
    validation_report,
    write_validation_reports,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tasks_arguments(parser)
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="repetitions, to find flaky tests (default: 1)"
    )
    add_grading_arguments(parser)
    parser.add_argument("--only-failed", action="store_true", help="repeat only the tasks in DIR that are not valid")
    parser.add_argument("--rebuild", action="store_true", help="rebuild the images and repeat all validations")
    add_run_arguments(parser)
    add_backend_argument(parser)
    add_cluster_argument(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Validate tasks; return 0 if all are valid, 1 if one is not, 30 after an infrastructure error."""
    require_positive(args, "runs", "workers", "jobs")
    grading, backend = grading_options(args), backend_of(args)
    if args.rebuild and args.cluster is not None:
        raise InvalidValue(
            "--rebuild and --cluster cannot be combined", hint="run minisandbox image rm on each node instead"
        )
    if args.only_failed and args.out is None:
        raise InvalidValue("--only-failed needs a run's directory", hint="name it: --only-failed -o DIR")
    tasks, selected = load_both(args)
    chosen = frozenset(selected.ids)
    with Progress() as progress:
        checks = cluster_checks(args, progress)
        work = SetRun(
            args,
            progress,
            here=checks is None,
            backend=backend,
            retry=args.only_failed,
            rebuild=args.rebuild,
        )
        found = run_validations(
            tasks,
            work.image_of,
            out=args.out,
            only=chosen,
            only_failed=args.only_failed,
            again=args.rebuild,
            runs=args.runs,
            workers=work.workers,
            timeout=grading.timeout,
            confirm=grading.confirm,
            config={"tasks": args.tasks, **backend_config(args)},
            build=work.build,
            progress=lambda news: show_progress(progress, news, line),
            elsewhere=checks,
        )
    if args.out is not None:
        write_validation_reports(args.out, found, len(tasks))
    asked = [one for one in found if one.instance_id in chosen]
    _print(args, found, asked, len(tasks))
    if checks is not None and not args.json:
        print_nodes(checks.reports)
    return status_of(asked)


def line(found: Validated, once: Once) -> str:
    """Return a result as one line.

    Args:
        found: the result.
        once: shortens errors that were printed before.
    """
    return f"{found.instance_id}: {found.status}" + (f": {why}" if (why := _reason(found, once)) else "")


def _reason(found: Validated, once: Once) -> str:
    return once(found.instance_id, found.detail) if found.status is Status.ERROR else detail(found)


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


def _changeable_line(counts: Mapping[str, int]) -> str:
    """Return the share of FAIL_TO_PASS tests that state an expectation, by where it is written."""
    total = sum(counts.values())
    stated = {kind: count for kind, count in counts.items() if kind not in ("none", Kind.APPENDED)}
    kinds = ", ".join(f"{kind} {count / total:.0%}" for kind, count in sorted(stated.items(), key=lambda one: -one[1]))
    return f"{sum(stated.values()) / total:.0%} of {total} FAIL_TO_PASS tests can be changed ({kinds})"


def _print(args: argparse.Namespace, found: Sequence[Validated], selected: Sequence[Validated], total: int) -> None:
    if args.json:
        print_json(validation_report(found, total))
        return
    once = Repeats().once
    print_table(
        (
            Column("task", whole=True),
            Column("status"),
            Column("cause"),
            Column("detail"),
            Column("seconds", number=True),
        ),
        [(one.instance_id, one.status, one.cause or "", _reason(one, once), f"{one.seconds:.1f}") for one in selected],
    )
    if counts := changeable_counts(selected):
        put(f"\n{_changeable_line(counts)}")
    if args.out is not None:
        valid = sum(one.valid for one in found)
        put(f"\n{valid} of {total} tasks are valid; report in {args.out}")
