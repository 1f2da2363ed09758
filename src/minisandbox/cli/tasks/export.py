"""``minisandbox tasks export``: write task sets in the formats of other programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, say
from minisandbox.cli.common.task_sets import add_shuffle_option, add_tasks_arguments, load, ordered_part, parse_range
from minisandbox.errors import InvalidValue
from minisandbox.tasks import TaskSet
from minisandbox.tasks.dialects.skyrl import row_of
from minisandbox.tasks.formats.documents import Layout
from minisandbox.tasks.saving import write_rows

KINDS = ("skyrl",)


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser."""
    export = verbs.add_parser(
        "export",
        help="write a set in another program's format: Parquet for SkyRL",
        description="Write train.parquet, and validation.parquet, for SkyRL. Each row has the whole task: its build, "
        "with pins, and its tests.",
    )
    add_tasks_arguments(export)
    export.add_argument("--to", choices=KINDS, required=True, help="the format")
    export.add_argument("--validation", metavar="TASKS", help="a task set for evaluation, taken whole")
    add_shuffle_option(export)
    export.add_argument(
        "--range", metavar="N", nargs="+",
        help="then take the tasks from A (from 0) to before B: A B, or A:B",
    )  # fmt: skip
    export.add_argument("-o", "--out", metavar="DIR", type=Path, required=True, help="the directory for the files")
    add_json_option(export)
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export a task set."""
    part = _part(args.range)
    tasks = load(args)
    parts = {"train": tasks.take(ordered_part(tasks.ids, args.shuffle, part))}
    if args.validation is not None:
        parts["validation"] = _validation(args)
        if common_ids := sorted(set(parts["train"].ids) & set(parts["validation"].ids)):
            hint = "divide the tasks: minisandbox tasks filter --split"
            raise InvalidValue(f"{common_ids[0]} is in both the training and the validation set", hint=hint)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, task_set in parts.items():
        rows = {task.instance_id: row_of(task, task_set.name or name) for task in task_set}
        write_rows(args.out / f"{name}.parquet", rows, Layout.PARQUET)
        say(f"{args.out / name}.parquet: {len(rows)} tasks")
    if args.json:
        print_json({name: list(task_set.ids) for name, task_set in parts.items()})
    return exits.OK


def _validation(args: argparse.Namespace) -> TaskSet:
    return load(argparse.Namespace(**{**vars(args), "tasks": args.validation, "only": []}))


def _part(numbers: Sequence[str] | None) -> slice:
    """Parse ``A:B``, or two numbers as in SkyRL's ``--data_range``.

    Raises:
        InvalidValue: the range is malformed.
    """
    if numbers is not None and len(numbers) > 2:
        raise InvalidValue(f"--range {' '.join(numbers)}: more than two numbers", hint="put TASKS before --range")
    return parse_range(None if numbers is None else ":".join(numbers))
