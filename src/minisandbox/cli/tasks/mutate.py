"""``minisandbox tasks mutate``: make bug-fix tasks from the projects of a set."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, print_json, require_positive, say
from minisandbox.cli.common.task_sets import add_tasks_arguments, cpus, load
from minisandbox.cli.tasks.selection import part_name, share
from minisandbox.errors import InvalidValue
from minisandbox.tasks import Task, TaskSet
from minisandbox.tasks.mutations import place_of, share_of


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    mutate = verbs.add_parser(
        "mutate",
        help="make bug-fix tasks: one-word bugs that the projects' own tests detect",
        description="Put one-word bugs into functions of the projects of TASKS, drawn by a seed, and write those that "
        "the projects' tests detect as tasks. Validate them like any others: minisandbox validate.",
    )
    add_tasks_arguments(mutate)
    mutate.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the file to write")
    mutate.add_argument("--seed", type=int, default=0, metavar="N", help="seed of every random choice (default: 0)")
    mutate.add_argument(
        "--per-function", type=int, default=2, metavar="N", help="maximum tasks per function (default: 2)"
    )
    mutate.add_argument("--tries", type=int, default=4, metavar="N", help="bugs to try per function (default: 4)")
    mutate.add_argument(
        "--split", metavar="NAME=SHARE", action="append", default=[],
        help="a part of the functions, written to FILE-NAME; repeat it for each part",
    )  # fmt: skip
    mutate.add_argument("--workers", type=int, metavar="N", help="bugs tried at once (default: one per CPU)")
    add_json_option(mutate)
    mutate.set_defaults(run=run, kept="finished layers are kept, and tasks in FILE-unfinished")


def run(args: argparse.Namespace) -> int:
    """Make tasks."""
    from minisandbox.cli.common.builds import Builder  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.grade.mutants import Mutating, clean_task, mutated_tasks  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.store import Store  # noqa: PLC0415 - listing tasks must not load it

    require_positive(args, "per_function", "tries", "workers")
    parts = dict(share(text) for text in args.split) or {"": 1.0}
    if not 0 < sum(parts.values()) <= 1.0001:
        raise InvalidValue(f"the parts add up to {sum(parts.values()):g}", hint="give more than 0, and at most 1")
    options = Mutating(seed=args.seed, per_function=args.per_function, tries=args.tries, shares=sum(parts.values()))
    with Progress() as progress:
        builder = Builder(Store.open(), progress, args.repo_mirrors)
        cleaned: dict[str, Task] = {}  # per project, one task without a bug
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
    """Return tasks; on an error or interrupt, first save the finished ones next to the output.

    Args:
        tasks: an iterator that makes the tasks.
        out: the output path, which is not written.
    """
    found: list[Task] = []
    try:
        for task in tasks:
            found.append(task)  # noqa: PERF402 - keeps the tasks when the next one fails
    except BaseException:  # interrupts too
        if found:
            path = part_name(out, "unfinished")
            TaskSet(found, name=path.name).save(path)
            say(f"{path}: {len(found)} finished tasks")
        raise
    return found


def write_parts(tasks: Sequence[Task], parts: Mapping[str, float], seed: int, out: Path) -> dict[Path, int]:
    """Write tasks to one file per part; all tasks of a function go to the same part.

    Args:
        tasks: tasks with mutated functions.
        parts: the share of the functions by part name; an empty name stands for `out` itself.
        seed: the seed of the division.
        out: the base of the parts' file names.

    Returns:
        The number of tasks in each file.
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
