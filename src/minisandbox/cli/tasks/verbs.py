"""``minisandbox tasks ls|show|check|filter|unique-images|merge|export``: read, check and convert task sets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, print_table, put, say
from minisandbox.cli.common.task_sets import add_source_options, add_tasks_arguments, load
from minisandbox.cli.tasks import check, export, selection
from minisandbox.errors import clean
from minisandbox.spec import PythonRecipe
from minisandbox.tasks import STATUSES_NAME, Task, read_statuses, write_statuses
from minisandbox.tasks.choosing import merged

DEFAULT = "quickstart"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    ls = verbs.add_parser("ls", help="list the tasks of a set")
    add_tasks_arguments(ls, default=DEFAULT)
    add_json_option(ls)
    ls.set_defaults(run=run_ls)
    show = verbs.add_parser("show", help="print one task: problem statement, build, tests, patch")
    add_source_options(show)
    show.add_argument("id", metavar="ID", help="the task's instance_id")
    add_json_option(show)
    show.set_defaults(run=run_show)
    check.configure(verbs)
    selection.configure(verbs)
    _configure_merge(verbs)
    export.configure(verbs)


def _configure_merge(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = verbs.add_parser(
        "merge",
        help="merge the statuses of several runs; later ones override earlier ones",
        description="Merge the statuses of several runs, later ones overriding earlier ones, and print the changes.",
    )
    merge.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=f"a {STATUSES_NAME}, or a run's directory")
    merge.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the file to write")
    add_json_option(merge)
    merge.set_defaults(run=run_merge)


def run_ls(args: argparse.Namespace) -> int:
    """List tasks."""
    tasks = load(args)
    if args.json:
        print_json([_summary(task) for task in tasks])
        return exits.OK
    print_table(
        ("id", "repository", "version", "form", "FAIL_TO_PASS", "PASS_TO_PASS"),
        [tuple(str(value) for value in _summary(task).values()) for task in tasks],
        numbers=("FAIL_TO_PASS", "PASS_TO_PASS"),
        unwrapped=["id"],
    )
    return exits.OK


def _summary(task: Task) -> dict[str, object]:
    return {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "version": task.version,
        "form": task.form,
        "FAIL_TO_PASS": len(task.FAIL_TO_PASS),
        "PASS_TO_PASS": len(task.PASS_TO_PASS),
    }


def run_show(args: argparse.Namespace) -> int:
    """Print one task: as text the problem statement, build, tests and patch; as JSON the whole row."""
    task = load(args)[args.id]
    if args.json:
        print_json(task.to_row())
        return exits.OK
    lines = [
        f"{task.instance_id}   {task.repo} {task.version} at {task.base_commit} ({task.form})",
        "",
        task.problem_statement.strip(),
        "",
        *_build_and_test_lines(task),
        f"hidden from the agent: {', '.join(task.hidden_files) or ('test_patch' if task.test_patch else 'nothing')}",
        f"FAIL_TO_PASS ({len(task.FAIL_TO_PASS)}):",
        *(f"  {test}" for test in task.FAIL_TO_PASS),
        f"PASS_TO_PASS: {len(task.PASS_TO_PASS)} tests",
        "",
        f"patch ({'the bug' if task.reference.reverse else 'the fix'}):",
        task.patch.rstrip(),
    ]
    put("\n".join(clean(line) for text in lines for line in text.split("\n")))
    return exits.OK


def _build_and_test_lines(task: Task) -> Iterator[str]:
    """Yield the build and test fields of a task's row; show only the size of a complete environment."""
    row = task.to_row()
    for part in ("build", "test"):
        for name, value in cast("dict[str, object]", row[part]).items():
            text = value if isinstance(value, str) else json.dumps(value)
            if name == "requirements" and isinstance(task.build, PythonRecipe) and task.build.complete:
                text = f"{len(task.build.requirements)} pinned, the complete environment"
            yield f"{part}.{name}: {text}"


def run_merge(args: argparse.Namespace) -> int:
    """Merge the statuses of tasks from several runs."""
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
