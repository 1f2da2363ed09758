"""``minisandbox tasks export``: task sets as other programs read them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.output import add_json_option, print_json, say
from minisandbox.cli.task_sets import add_tasks_arguments, load
from minisandbox.cli.tasks_filter import parse_range
from minisandbox.errors import InvalidValue
from minisandbox.tasks import TaskSet
from minisandbox.tasks.choosing import shuffled
from minisandbox.tasks.dialects.skyrl import row_of
from minisandbox.tasks.documents import Layout
from minisandbox.tasks.saving import write_rows

KINDS = ("skyrl",)


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the options."""
    export = verbs.add_parser(
        "export",
        help="write a set as another program reads it: Parquet for SkyRL",
        description="Write train.parquet, and validation.parquet, as SkyRL reads them. Each row has its whole task: "
        "how it is built and tested, pins included.",
    )
    add_tasks_arguments(export)
    export.add_argument("--to", choices=KINDS, required=True, help="whose format")
    export.add_argument("--validation", metavar="TASKS", help="a set to evaluate on, of which all tasks are taken")
    export.add_argument("--shuffle", type=int, metavar="SEED", help="mix the tasks, the same way for the same seed")
    export.add_argument(
        "--range", metavar="N", nargs="+",
        help="of what is left then, the tasks from the A-th (from 0) to the one before the B-th: A B, or A:B",
    )  # fmt: skip
    export.add_argument("-o", "--out", metavar="DIR", type=Path, required=True, help="the directory for the files")
    add_json_option(export)
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export a set."""
    part = _part(args.range)
    tasks = load(args)
    ids = list(tasks.ids) if args.shuffle is None else shuffled(tasks.ids, args.shuffle)
    parts = {"train": tasks.take(ids[part])}
    if args.validation is not None:
        parts["validation"] = _validation(args)
        if both := sorted(set(parts["train"].ids) & set(parts["validation"].ids)):
            raise InvalidValue(
                f"{both[0]} is trained on and evaluated on", hint="divide the tasks: minisandbox tasks filter --split"
            )
    args.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in parts.items():
        rows = {task.instance_id: row_of(task, chosen.name or name) for task in chosen}
        write_rows(args.out / f"{name}.parquet", rows, Layout.PARQUET)
        say(f"{args.out / name}.parquet: {len(rows)} tasks")
    if args.json:
        print_json({name: list(chosen.ids) for name, chosen in parts.items()})
    return exits.OK


def _validation(args: argparse.Namespace) -> TaskSet:
    return load(argparse.Namespace(**{**vars(args), "tasks": args.validation, "only": []}))


def _part(words: Sequence[str] | None) -> slice:
    """``A:B``, or the two by themselves, as the original's ``--data_range`` took them.

    Raises:
        InvalidValue: it is neither.
    """
    if words is not None and len(words) > 2:
        raise InvalidValue(f"--range {' '.join(words)}: more than two numbers", hint="name the tasks before it")
    return parse_range(None if words is None else ":".join(words))
