"""``minisandbox validate``: check that each task fails before and passes after its reference patch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

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
from minisandbox.cli.common.run_options import (
    add_backend_argument,
    add_cluster_argument,
    add_grading_arguments,
    backend_of,
    grading_options,
)
from minisandbox.cli.common.set_runs import SetRun
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
    """Add the options to the parser."""
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
    """Validate tasks; return 0 if all are valid, 1 if a task is invalid, 30 after an infrastructure error."""
    require_positive(args, "runs", "workers", "jobs")
    grading = grading_options(args)
    backend_of(args)  # reject contradictory options before the slow loading of tasks
    if args.rebuild and args.cluster is not None:
        raise InvalidValue(
            "--rebuild and --cluster cannot be combined", hint="run minisandbox image rm on each node instead"
        )
    if args.only_failed and args.out is None:
        raise InvalidValue("--only-failed needs a run's directory", hint="name it: --only-failed -o DIR")
    tasks, selected_tasks = load_both(args)
    selected_ids = frozenset(selected_tasks.ids)
    with Progress() as progress:
        set_run: SetRun[Validated] = SetRun(
            args, progress, line, {"tasks": args.tasks}, retry=args.only_failed, rebuild=args.rebuild
        )
        results = run_validations(
            tasks,
            set_run.image_of,
            only=selected_ids,
            only_failed=args.only_failed,
            again=args.rebuild,
            runs=args.runs,
            timeout=grading.timeout,
            confirm=grading.confirm,
            **set_run.options,
        )
    if args.out is not None:
        write_validation_reports(args.out, results, len(tasks))
    selected_results = [result for result in results if result.instance_id in selected_ids]
    _print(args, results, selected_results, len(tasks))
    set_run.print_nodes()
    return status_of(selected_results)


def line(result: Validated, once: Once) -> str:
    """Format a result as one line.

    Args:
        result: the result.
        once: shortens an error that was printed before.
    """
    return f"{result.instance_id}: {result.status}" + (f": {reason}" if (reason := _reason(result, once)) else "")


def _reason(result: Validated, once: Once) -> str:
    return once(result.instance_id, result.detail) if result.status is Status.ERROR else detail(result)


def status_of(results: Sequence[Validated]) -> int:
    """Return the exit status for a set of validations."""
    if any(result.status is Status.ERROR for result in results):
        return GradingError.exit_code
    return exits.OK if all(result.valid for result in results) else exits.NEGATIVE


def detail(result: Validated) -> str:
    """Return the reason of a result with its first test, in one line; for a valid task, return its notes."""
    if result.valid:
        return "; ".join(f"note: {note}" for note in result.notes)
    tests = f" ({result.tests[0]}{', ...' if len(result.tests) > 1 else ''})" if result.tests else ""
    return result.detail + tests


def _changeable_line(counts: Mapping[str, int]) -> str:
    """Format the share of FAIL_TO_PASS tests with a changeable expectation, by the kind of expectation."""
    test_count = sum(counts.values())
    changeable = {kind: count for kind, count in counts.items() if kind not in ("none", Kind.APPENDED)}
    kinds = ", ".join(
        f"{kind} {count / test_count:.0%}" for kind, count in sorted(changeable.items(), key=lambda item: -item[1])
    )
    share = f"{sum(changeable.values()) / test_count:.0%}"
    return f"{share} of {test_count} FAIL_TO_PASS tests can be changed ({kinds})"


def _print(
    args: argparse.Namespace, results: Sequence[Validated], selected: Sequence[Validated], task_count: int
) -> None:
    if args.json:
        print_json(validation_report(results, task_count))
        return
    once = Repeats().once
    print_table(
        ("task", "status", "cause", "detail", "seconds"),
        [
            (result.instance_id, result.status, result.cause or "", _reason(result, once), f"{result.seconds:.1f}")
            for result in selected
        ],
        numbers=["seconds"],
        unwrapped=["task"],
    )
    if counts := changeable_counts(selected):
        put(f"\n{_changeable_line(counts)}")
    if args.out is not None:
        valid_count = sum(result.valid for result in results)
        put(f"\n{valid_count} of {task_count} tasks are valid; report in {args.out}")
