"""``minisandbox tasks merge``: merge the statuses of several runs into one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, print_table, say
from minisandbox.tasks import STATUSES_NAME, read_statuses, write_statuses
from minisandbox.tasks.choosing import merged


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser."""
    merge = verbs.add_parser(
        "merge",
        help="merge the statuses of several runs; later ones override earlier ones",
        description="Merge the statuses of several runs, later ones overriding earlier ones, and print the changes.",
    )
    merge.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=f"a {STATUSES_NAME}, or a run's directory")
    merge.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the file to write")
    add_json_option(merge)
    merge.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge statuses."""
    statuses, changes = merged([read_statuses(path) for path in args.runs])
    write_statuses(args.out, statuses)
    rows = [(change.instance_id, change.before, change.after, str(args.runs[change.by])) for change in changes]
    if args.json:
        keys = ("instance_id", "before", "after", "by")
        print_json({"tasks": len(statuses), "changed": [dict(zip(keys, row, strict=True)) for row in rows]})
    elif rows:
        print_table(("task", "before", "after", "by"), rows, unwrapped=["task"])
    say(f"{args.out}: {len(statuses)} tasks; {len(changes)} changes")
    return exits.OK
