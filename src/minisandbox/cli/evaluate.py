"""``minisandbox evaluate``: grade predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.backends import add_backend_argument, backend_config, backend_of
from minisandbox.cli.common.cluster_options import add_cluster_argument, cluster_checks, print_nodes
from minisandbox.cli.common.grading_options import add_grading_arguments, grading_options
from minisandbox.cli.common.output import (
    Column,
    Once,
    Progress,
    add_json_option,
    print_json,
    print_table,
    put,
    require_positive,
    say,
)
from minisandbox.cli.common.set_runs import SetRun, show_progress
from minisandbox.cli.common.task_sets import add_run_arguments, add_tasks_arguments, load_both
from minisandbox.errors import GradingError, NotFound
from minisandbox.grade import (
    EMPTY,
    GOLD,
    Evaluated,
    Evaluation,
    Prediction,
    Verdict,
    empty_predictions,
    evaluation_report,
    read_predictions,
    reference_predictions,
    repository_scores,
    run_evaluation,
    write_evaluation_reports,
)
from minisandbox.tasks import TaskSet

_SHOWN = 5  # unknown or malformed predictions listed on the terminal; the report has all


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tasks_arguments(parser)
    parser.add_argument(
        "-p",
        "--predictions",
        required=True,
        metavar="PATH",
        help=f"preds.json, a JSONL file or a directory of .pred files; {GOLD}: reference patches; {EMPTY}: no patch",
    )
    add_grading_arguments(parser)
    add_run_arguments(parser, "predictions")
    add_backend_argument(parser)
    add_cluster_argument(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate predictions.

    Returns:
        0 if each has a verdict; 1 if a prediction is unusable; 30 if one is unconfirmed or had an infrastructure error.
    """
    require_positive(args, "workers", "jobs")
    grading, backend = grading_options(args), backend_of(args)
    everything, tasks = load_both(args)
    predictions = _predictions(args.predictions, everything, tasks)
    with Progress() as progress:
        checks = cluster_checks(args, progress)
        work = SetRun(args, progress, here=checks is None, backend=backend, retry=True)
        found = run_evaluation(
            tasks,
            predictions,
            work.image_of,
            out=args.out,
            workers=work.workers,
            timeout=grading.timeout,
            confirm=grading.confirm,
            config={"tasks": args.tasks, "predictions": args.predictions, **backend_config(args)},
            build=work.build,
            progress=lambda news: show_progress(progress, news, _line),
            elsewhere=checks,
        )
    if args.out is not None:
        write_evaluation_reports(args.out, found)
    if args.json:
        print_json(evaluation_report(found))
    else:
        _print(found, args.out)
        if checks is not None:
            print_nodes(checks.reports)
    _complain(found)
    return _status(found)


def _predictions(where: str, everything: TaskSet, chosen: TaskSet) -> Sequence[Prediction]:
    """Read the predictions, without those for tasks that were not selected.

    Raises:
        NotFound: the task set has no task for any of them.
    """
    if where in (GOLD, EMPTY):
        return reference_predictions(chosen) if where == GOLD else empty_predictions(chosen)
    found = read_predictions(Path(where))
    if not any(one.instance_id in everything for one in found):
        raise NotFound(
            f"none of the {len(found)} predictions in {where} is for a task of {everything.name}",
            reason=f"they belong to another task set: the first is for {found[0].instance_id}",
            hint=f"the set's first task is {everything.ids[0]}",
        )
    return [one for one in found if one.instance_id in chosen or one.instance_id not in everything]


def _line(one: Evaluated, once: Once) -> str:
    return f"{one.instance_id}: {one.verdict}" + ("" if one.finished else f": {once(one.instance_id, one.detail)}")


def _print(found: Evaluation, out: Path | None) -> None:
    """Print each prediction's verdict, then the scores by repository."""
    print_table(
        [Column("task", whole=True), Column("verdict"), Column("reason"), Column("flags"), Column("seconds", True)],
        [
            (one.instance_id, one.verdict, one.reason, ", ".join(f.kind for f in one.flags), f"{one.seconds:.1f}")
            for one in found.results
        ],
    )
    put()
    columns = ("repository", "tasks", "predictions", "resolved", "accuracy")
    scores = repository_scores(found).items()
    print_table(
        [Column(title, number=title != "repository", whole=title == "repository") for title in columns],
        [
            (repo, f"{row['tasks']}", f"{row['predictions']}", f"{row['resolved']}", f"{row['accuracy']:.1%}")
            for repo, row in scores
        ],
    )
    resolved, total = sum(one.resolved for one in found.results), len(found.tasks)
    unconfirmed = sum(one.verdict == Verdict.UNCONFIRMED for one in found.results)
    more = f"; {unconfirmed} unconfirmed, which count as neither resolved nor failed" if unconfirmed else ""
    where = "" if out is None else f"; reports in {out}"
    put(f"\n{resolved} of {total} tasks resolved ({resolved / total:.1%}){more}{where}")


def _complain(found: Evaluation) -> None:
    """Report predictions that could not be evaluated."""
    unknown = [f"{one.instance_id} ({one.place})" for one in found.unknown]
    malformed = [f"{one.instance_id} {one.problem} ({one.place})" for one in found.predictions if one.problem]
    for what, names in (("for tasks that are not in the set", unknown), ("that cannot be used", malformed)):
        if names:
            more = [f"  and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
            say(f"minisandbox: predictions {what}: {len(names)}", *(f"  {name}" for name in names[:_SHOWN]), *more)
    failed = sum(not one.finished for one in found.results)
    if failed:
        say(
            f"minisandbox: predictions without a verdict: {failed}",
            "  what to do: repeat the command (with -o it runs only these); check a task with minisandbox validate",
        )


def _status(found: Evaluation) -> int:
    if not all(one.finished for one in found.results):
        return GradingError.exit_code
    wrong = found.unknown or any(one.problem for one in found.predictions)
    return exits.NEGATIVE if wrong else exits.OK
