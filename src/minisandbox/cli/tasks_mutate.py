"""``minisandbox tasks mutate``: bug-fix tasks made of the projects of a set."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.output import Progress, add_json_option, print_json, require_positive, say
from minisandbox.cli.task_sets import add_tasks_arguments, load
from minisandbox.cli.tasks_filter import part_name, share
from minisandbox.errors import InvalidValue
from minisandbox.tasks import Task, TaskSet
from minisandbox.tasks.mutations import place_of, share_of


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the options."""
    mutate = verbs.add_parser(
        "mutate",
        help="make bug-fix tasks: one wrong word in a function, found by the project's own tests",
        description="Put bugs of one word into the functions of the projects of TASKS, drawn by a seed, and write "
        "those that the projects' tests find as tasks. Validate them like any others: minisandbox validate.",
    )
    add_tasks_arguments(mutate)
    mutate.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the file to write")
    mutate.add_argument("--seed", type=int, default=0, metavar="N", help="of every choice (default: 0)")
    mutate.add_argument(
        "--per-function", type=int, default=2, metavar="N", help="tasks of one function at most (default: 2)"
    )
    mutate.add_argument(
        "--tries", type=int, default=4, metavar="N", help="bugs of a function that are tried for these (default: 4)"
    )
    mutate.add_argument(
        "--split", metavar="NAME=SHARE", action="append", default=[],
        help="a part of the functions, written to FILE-NAME; give it once for each part",
    )  # fmt: skip
    mutate.add_argument("--workers", type=int, metavar="N", help="bugs that are tried at once (default: one per CPU)")
    add_json_option(mutate)
    mutate.set_defaults(run=run, kept="finished layers are kept, and tasks in FILE-unfinished")


def run(args: argparse.Namespace) -> int:
    """Make tasks."""
    from minisandbox.cli.builds import Builder  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.cli.validate import cpus  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.grade.mutants import Mutating, clean_task, mutated_tasks  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.store import Store  # noqa: PLC0415 - listing tasks must not load it

    require_positive(args, "per_function", "tries", "workers")
    parts = dict(share(text) for text in args.split) or {"": 1.0}
    if not 0 < sum(parts.values()) <= 1.0001:
        raise InvalidValue(f"the parts add up to {sum(parts.values()):g}", hint="give more than 0, and at most 1")
    options = Mutating(seed=args.seed, per_function=args.per_function, tries=args.tries, shares=sum(parts.values()))
    with Progress() as progress:
        builder = Builder(Store.open(), progress, args.repo_mirrors)
        cleaned: dict[str, Task] = {}  # one task without a bug for each project
        for task in map(clean_task, load(args)):
            cleaned.setdefault(task.instance_id, task)
        work = functools.partial(mutated_tasks, options=options, workers=args.workers or cpus(), tell=progress.note)
        made = (work(clean, builder.image_of(clean)) for clean in cleaned.values())
        found = collect(chain.from_iterable(made), args.out)
    counts = write_parts(found, parts, options.seed, args.out)
    if args.json:
        print_json({str(path): count for path, count in counts.items()})
    return exits.OK


def collect(tasks: Iterable[Task], out: Path) -> list[Task]:
    """Return tasks; where making them fails or is interrupted, those that there are are written beside the output.

    Args:
        tasks: as they are made.
        out: the output, which stays as it was.
    """
    found: list[Task] = []
    try:
        for task in tasks:
            found.append(task)  # noqa: PERF402 - what there is stays where the next one fails
    except BaseException:  # a Ctrl-C too
        if found:
            path = part_name(out, "unfinished")
            TaskSet(found, name=path.name).save(path)
            say(f"{path}: {len(found)} tasks that were made until then")
        raise
    return found


def write_parts(tasks: Sequence[Task], parts: Mapping[str, float], seed: int, out: Path) -> dict[Path, int]:
    """Write tasks to a file for each part; a function's tasks are all in one.

    Args:
        tasks: of mutated functions.
        parts: by name the share of the functions; a name that is empty stands for `out` itself.
        seed: of the division.
        out: the file that the parts' files are called after.

    Returns:
        How many tasks each file has.
    """
    counts, low = {}, 0.0
    for name, width in parts.items():
        chosen = [task for task in tasks if low <= _share(task, seed) < low + width]
        low += width
        path = part_name(out, name) if name else out
        TaskSet(chosen, name=path.name).save(path)
        functions = len({place_of(task.problem_statement) for task in chosen})
        say(f"{path}: {len(chosen)} tasks of {functions} functions")
        counts[path] = len(chosen)
    return counts


def _share(task: Task, seed: int) -> float:
    place = place_of(task.problem_statement)
    assert place is not None
    return share_of(task.repo, *place, seed)
