"""``minisandbox tasks ls|show``."""

from __future__ import annotations

import argparse

from minisandbox.cli import exits
from minisandbox.cli.output import Column, add_json_option, clean, print_json, print_table
from minisandbox.tasks import Task, TaskSet

DEFAULT = "quickstart"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    ls = verbs.add_parser("ls", help="list the tasks of a set")
    add_tasks_arguments(ls, default=DEFAULT)
    add_json_option(ls)
    ls.set_defaults(run=run_ls)
    show = verbs.add_parser("show", help="print one task")
    show.add_argument("tasks", metavar="TASKS", help="a JSONL file, or the name of a bundled set")
    show.add_argument("id", metavar="ID", help="the task's instance_id")
    add_json_option(show)
    show.set_defaults(run=run_show)


def add_tasks_arguments(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Declare what every command over tasks takes: the set, and which of its tasks."""
    what = "a JSONL file, or the name of a bundled set"
    if default is None:
        parser.add_argument("tasks", metavar="TASKS", help=what)
    else:
        parser.add_argument("tasks", metavar="TASKS", nargs="?", default=default, help=f"{what} (default: {default})")
    parser.add_argument(
        "--only", metavar="ID", action="append", default=[], help="an id or a glob of ids; may be given several times"
    )


def load(args: argparse.Namespace) -> TaskSet:
    """Read the tasks that :func:`add_tasks_arguments` let the user choose."""
    tasks = TaskSet.load(args.tasks)
    return tasks.select(args.only) if args.only else tasks


def run_ls(args: argparse.Namespace) -> int:
    """List tasks."""
    tasks = load(args)
    if args.json:
        print_json([_summary(task) for task in tasks])
        return exits.OK
    columns = ("id", "repository", "version", "form", "FAIL_TO_PASS", "PASS_TO_PASS")
    print_table(
        [Column(title, number=title.endswith("_PASS"), whole=title == "id") for title in columns],
        [tuple(str(value) for value in _summary(task).values()) for task in tasks],
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
    """Print one task: for people what an agent sees, then what decides; as JSON the whole row."""
    task = TaskSet.load(args.tasks)[args.id]
    if args.json:
        print_json(task.to_row())
        return exits.OK
    build = task.build
    lines = [
        f"{task.instance_id}   {task.repo} {task.version} at {task.base_commit} ({task.form})",
        "",
        task.problem_statement.strip(),
        "",
        f"python: {build.python or 'the host'}   requirements: {', '.join(build.requirements) or 'none'}",
        *(f"install: {command}" for command in build.install),
        f"tests: {task.test_command}   (at most {task.test_timeout:g} s)",
        f"hidden from the agent: {', '.join(task.hidden_files) or ('test_patch' if task.test_patch else 'nothing')}",
        f"FAIL_TO_PASS ({len(task.FAIL_TO_PASS)}):",
        *(f"  {test}" for test in task.FAIL_TO_PASS),
        f"PASS_TO_PASS: {len(task.PASS_TO_PASS)} tests",
        "",
        f"patch ({'the bug' if task.reference.reverse else 'the fix'}):",
        task.patch.rstrip(),
    ]
    print("\n".join(clean(line) for text in lines for line in text.split("\n")))
    return exits.OK
