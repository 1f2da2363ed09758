"""``minisandbox evaluate``: grade predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Once,
    Progress,
    add_json_option,
    print_json,
    print_table,
    put,
    require_positive,
    say,
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

_MAX_SHOWN = 5  # maximum number of faulty predictions to print; the report lists all


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
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
        0 if each prediction has a verdict; 1 if a prediction is unusable; 30 if a prediction is unconfirmed or had an
        infrastructure error.
    """
    require_positive(args, "workers", "jobs")
    grading = grading_options(args)
    backend_of(args)  # reject contradictory options before the slow loading of tasks
    all_tasks, tasks = load_both(args)
    predictions = _predictions(args.predictions, all_tasks, tasks)
    with Progress() as progress:
        config = {"tasks": args.tasks, "predictions": args.predictions}
        set_run: SetRun[Evaluated] = SetRun(args, progress, _line, config, retry=True)
        evaluation = run_evaluation(
            tasks,
            predictions,
            set_run.image_of,
            timeout=grading.timeout,
            confirm=grading.confirm,
            **set_run.options,
        )
    if args.out is not None:
        write_evaluation_reports(args.out, evaluation)
    if args.json:
        print_json(evaluation_report(evaluation))
    else:
        _print(evaluation, args.out)
        set_run.print_nodes()
    _complain(evaluation)
    return _status(evaluation)


def _predictions(source: str, all_tasks: TaskSet, tasks: TaskSet) -> Sequence[Prediction]:
    """Read the predictions, and drop those for tasks that were not selected.

    Raises:
        NotFound: no prediction is for a task of the set.
    """
    if source in (GOLD, EMPTY):
        return reference_predictions(tasks) if source == GOLD else empty_predictions(tasks)
    predictions = read_predictions(Path(source))
    if not any(prediction.instance_id in all_tasks for prediction in predictions):
        raise NotFound(
            f"none of the {len(predictions)} predictions in {source} is for a task of {all_tasks.name}",
            reason=f"they belong to another task set: the first is for {predictions[0].instance_id}",
            hint=f"the set's first task is {all_tasks.ids[0]}",
        )
    return [
        prediction
        for prediction in predictions
        if prediction.instance_id in tasks or prediction.instance_id not in all_tasks
    ]


def _line(result: Evaluated, once: Once) -> str:
    detail = "" if result.finished else f": {once(result.instance_id, result.detail)}"
    return f"{result.instance_id}: {result.verdict}{detail}"


def _print(evaluation: Evaluation, out: Path | None) -> None:
    """Print each prediction's verdict, then the scores by repository."""
    print_table(
        ("task", "verdict", "reason", "flags", "seconds"),
        [
            (
                result.instance_id, result.verdict, result.reason, ", ".join(flag.kind for flag in result.flags),
                f"{result.seconds:.1f}",
            )
            for result in evaluation.results
        ],
        numbers=["seconds"],
        unwrapped=["task"],
    )  # fmt: skip
    put()
    counts = ("tasks", "predictions", "resolved")
    print_table(
        ("repository", *counts, "accuracy"),
        [
            (repo, *(f"{score[name]}" for name in counts), f"{score['accuracy']:.1%}")
            for repo, score in repository_scores(evaluation).items()
        ],
        numbers=(*counts, "accuracy"),
        unwrapped=["repository"],
    )
    resolved_count, task_count = sum(result.resolved for result in evaluation.results), len(evaluation.tasks)
    unconfirmed_count = sum(result.verdict == Verdict.UNCONFIRMED for result in evaluation.results)
    remark = (
        f"; {unconfirmed_count} unconfirmed, which count as neither resolved nor failed" if unconfirmed_count else ""
    )
    reports = "" if out is None else f"; reports in {out}"
    share = f"{resolved_count / task_count:.1%}"
    put(f"\n{resolved_count} of {task_count} tasks resolved ({share}){remark}{reports}")


def _complain(evaluation: Evaluation) -> None:
    """Report predictions that could not be evaluated."""
    unknown = [f"{p.instance_id} ({p.place})" for p in evaluation.unknown]
    malformed = [f"{p.instance_id} {p.problem} ({p.place})" for p in evaluation.predictions if p.problem]
    for fault, names in (("for tasks that are not in the set", unknown), ("that cannot be used", malformed)):
        if names:
            lines = [f"  {name}" for name in names[:_MAX_SHOWN]]
            if len(names) > _MAX_SHOWN:
                lines.append(f"  and {len(names) - _MAX_SHOWN} more")
            say(f"minisandbox: predictions {fault}: {len(names)}", *lines)
    unfinished_count = sum(not result.finished for result in evaluation.results)
    if unfinished_count:
        say(
            f"minisandbox: predictions without a verdict: {unfinished_count}",
            "  what to do: repeat the command (with -o it runs only these); check a task with minisandbox validate",
        )


def _status(evaluation: Evaluation) -> int:
    if not all(result.finished for result in evaluation.results):
        return GradingError.exit_code
    has_unusable = evaluation.unknown or any(prediction.problem for prediction in evaluation.predictions)
    return exits.NEGATIVE if has_unusable else exits.OK
