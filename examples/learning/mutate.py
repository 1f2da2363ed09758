"""Make bug-fix tasks from the projects of a task set: one-word bugs that the projects' own tests detect.

    python -m examples.learning.mutate quickstart --split train=0.4 --split held-out=0.25 -o mutations.jsonl

The same seed makes the same tasks. Validate them like any others: ``minisandbox validate``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from examples.learning.mutants import Mutating, clean_task, mutated_tasks
from examples.learning.mutations import function_of, share_of

from minisandbox import Store
from minisandbox.images import build
from minisandbox.tasks import Task, TaskSet


def main() -> None:
    """Make tasks, and write one file per part."""
    parser = argparse.ArgumentParser(description="make bug-fix tasks: one-word bugs that a project's tests detect")
    parser.add_argument("tasks", help="a task set, of which each project is used once")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random choice")
    parser.add_argument("--per-function", type=int, default=2, help="maximum tasks per function")
    parser.add_argument("--tries", type=int, default=4, help="bugs to try per function")
    parser.add_argument(
        "--split", metavar="NAME=SHARE", type=_share, action="append",
        help="a part of the functions, written to FILE-NAME; repeat it for each part",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="bugs tried at once")
    args = parser.parse_args()
    parts = dict(args.split or [("", 1.0)])
    options = Mutating(args.seed, args.per_function, args.tries, shares=sum(parts.values()))
    store, tasks = Store.open(), list[Task]()
    for clean in {task.instance_id: task for task in map(clean_task, TaskSet.load(args.tasks))}.values():
        image = build(clean.recipe(), store=store, name=clean.instance_id)
        tasks += mutated_tasks(clean, image, options, workers=args.workers, report=print)
    write_parts(tasks, parts, args.seed, args.out)


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    return name, float(share)


def write_parts(tasks: Iterable[Task], parts: Mapping[str, float], seed: int, out: Path) -> dict[Path, int]:
    """Write tasks to one file per part; all tasks of a function go to the same part.

    Args:
        tasks: tasks with mutated functions.
        parts: the share of the functions by part name; an empty name stands for `out` itself.
        seed: the seed of the division.
        out: the base of the parts' file names.

    Returns:
        The number of tasks in each file.
    """
    shares = [(_share_of(task, seed), task) for task in tasks]
    counts, start = {}, 0.0
    for name, width in parts.items():
        part = [task for share, task in shares if start <= share < start + width]
        start += width
        path = out.with_stem(f"{out.stem}-{name}") if name else out
        TaskSet(part, name=path.name).save(path)
        print(f"{path}: {len(part)} tasks of {len({function_of(task.problem_statement) for task in part})} functions")
        counts[path] = len(part)
    return counts


def _share_of(task: Task, seed: int) -> float:
    function = function_of(task.problem_statement)
    assert function is not None
    return share_of(task.repo, *function, seed)


if __name__ == "__main__":
    main()
