"""Write the answers of an oracle: one-word bugs in functions, and the edits that fix them. No tests are run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.learning.model import encode
from examples.learning.mutants import Mutating, clean_task, sources, usable
from examples.learning.mutations import Function, Mutant, draw_mutants, functions, share_of
from transformers import AutoTokenizer

from minisandbox import Sandbox, Store
from minisandbox.images import build
from minisandbox.tasks import Task, TaskSet

SHARES = 0.65
"""Functions whose `share_of` is below become tasks; the others become answers of the oracle."""

_EXCLUDED = frozenset(
    {"test", "tests", "site-packages", "__pycache__", "idlelib", "ensurepip", "lib2to3", "pydoc_data"}
)


def standard_library() -> Iterator[Function]:
    """Yield the usable functions of Python's standard library, without those of its tests."""
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        if not _EXCLUDED & set(file.parts):
            try:
                yield from _usable(file.as_posix(), path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue


def functions_without_task(tasks: Iterable[Task], *, above: float, seed: int) -> Iterator[Function]:
    """Yield the functions of the tasks' projects that no task uses: functions whose share is at least `above`."""
    store = Store.open()
    for clean in {task.instance_id: task for task in map(clean_task, tasks)}.values():
        image = build(clean.recipe(), store=store, name=clean.instance_id)
        with Sandbox.create(image.spec()) as box:
            for file, text in sources(box):
                for function in _usable(file, text):
                    if share_of(clean.repo, function.file, function.name, seed) >= above:
                        yield function


def _usable(file: str, text: str) -> Iterator[Function]:
    options = Mutating()
    return (function for function in functions(text, file) if usable(function, options))


def mutants_of(functions: Iterable[Function], per_function: int, seed: int) -> list[Mutant]:
    """Return bugs of functions, at most `per_function` of each."""
    return [mutant for function in functions for mutant in draw_mutants(function, per_function, seed)]


def main() -> None:
    """Write the oracle's answers."""
    parser = argparse.ArgumentParser(description="write an oracle's answers, for minisandbox train sft")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the model whose tokenizer is used")
    parser.add_argument("--per-function", type=int, default=8, metavar="N", help="maximum bugs per function")
    args = parser.parse_args()
    write_warm_up(args.out, args.model, args.per_function)


def write_warm_up(out: Path, model: Path, per_function: int) -> None:
    """Write rows for `minisandbox train sft`: bugs in functions that no task uses, and their fixes."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = []
    for mutant in mutants_of(functions_without_task(TaskSet.load("quickstart"), above=SHARES, seed=0), per_function, 0):
        ids, mask = encode(tokenizer, mutant.view, mutant.fix.text)
        lines.append(json.dumps({"input_ids": ids, "loss_mask": mask, "traj_id": mutant.digest}))
    temporary_path = out.with_suffix(".part")
    temporary_path.write_text("".join(f"{line}\n" for line in lines))
    temporary_path.replace(out)
    print(f"{out}: {len(lines)} answers of the oracle", flush=True)


if __name__ == "__main__":
    main()
