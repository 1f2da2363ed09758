"""``minisandbox tasks ls|show|check|filter|unique-images|merge|mutate|export``: read, check and convert task sets."""

from __future__ import annotations

import argparse

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Column, add_json_option, print_json, print_table, put
from minisandbox.cli.common.task_sets import add_source_options, add_tasks_arguments, load
from minisandbox.cli.tasks import check, export, merge, mutate, selection
from minisandbox.errors import clean
from minisandbox.tasks import Build, Grader, PythonBuild, Task

DEFAULT = "quickstart"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
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
    merge.configure(verbs)
    export.configure(verbs)
    mutate.configure(verbs)


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


def _grader_words(grader: Grader) -> list[str]:
    shown = ("grader", "command", "timeout")
    return [f"{name}: {value}" for name, value in grader.to_row().items() if name not in shown]


def run_show(args: argparse.Namespace) -> int:
    """Print one task: for people the problem statement, build, tests and patch; as JSON the whole row."""
    task = load(args)[args.id]
    if args.json:
        print_json(task.to_row())
        return exits.OK
    lines = [
        f"{task.instance_id}   {task.repo} {task.version} at {task.base_commit} ({task.form})",
        "",
        task.problem_statement.strip(),
        "",
        *_build_lines(task.build),
        f"tests: {task.grader.command}   (timeout {task.grader.timeout:g} s)",
        "   ".join((f"grader: {task.grader.kind}", *_grader_words(task.grader))),
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


def _build_lines(build: Build) -> list[str]:
    """Return the lines that describe a build; a complete environment only by its size."""
    if not isinstance(build, PythonBuild):
        return [f"{name}: {value}" for name, value in build.to_row().items()]
    requirements = ", ".join(build.requirements) or "none"
    if build.complete:
        requirements = f"{len(build.requirements)} pinned, the complete environment"
    source = "none" if build.source is None else " ".join(value for _, value in build.source.fields)
    return [
        f"python: {build.python or 'the host'}   requirements: {requirements}",
        *([f"overrides: {', '.join(build.overrides)}"] if build.overrides else []),
        *([f"system packages: {', '.join(build.system)}"] if build.system else []),
        f"source: {'' if build.source is None else build.source.kind + ' '}{source}",
        *(f"install: {command}" for command in build.install),
        *([f"network of the install commands: {build.network}"] if build.network != "index" else []),
        *([f"only packages uploaded before: {build.exclude_newer}"] if build.exclude_newer else []),
        *([f"PyTorch: builds for {build.torch_backend}"] if build.torch_backend else []),
        *(f"environment: {name}={value}" for name, value in build.environment),
    ]
