"""Answers of an oracle: bugs of one word in functions, and the edits that take them out. No test is run for these."""

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
"""Of the functions, by `share_of`: tasks are made of those below, the oracle's answers of the others."""

_APART = frozenset({"test", "tests", "site-packages", "__pycache__", "idlelib", "ensurepip", "lib2to3", "pydoc_data"})


def standard_library() -> Iterator[Function]:
    """Yield the functions of Python's standard library, without its tests, that a task could be made of."""
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _APART & set(name.parts):
            try:
                yield from _usable(name.as_posix(), path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue


def functions_apart(tasks: Iterable[Task], *, above: float, seed: int) -> Iterator[Function]:
    """Yield the functions of the tasks' projects that no task is made of: those whose share is not below `above`."""
    store = Store.open()
    for clean in {one.instance_id: one for one in map(clean_task, tasks)}.values():
        image = build(clean.recipe(), store=store, name=clean.instance_id)
        with Sandbox.create(image.spec()) as box:
            for file, text in sources(box):
                for one in _usable(file, text):
                    if share_of(clean.repo, one.file, one.name, seed) >= above:
                        yield one


def _usable(file: str, text: str) -> Iterator[Function]:
    options = Mutating()
    return (one for one in functions(text, file) if usable(one, options))


def mutants_of(found: Iterable[Function], per_function: int, seed: int) -> list[Mutant]:
    """Return bugs of functions, at most so many of each."""
    return [mutant for one in found for mutant in draw_mutants(one, per_function, seed)]


def main() -> None:
    """Write the oracle's answers."""
    parser = argparse.ArgumentParser(description="write what an oracle answers, for minisandbox train sft")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the model whose tokens are written")
    parser.add_argument("--per-function", type=int, default=8, metavar="N", help="bugs of a function at most")
    given = parser.parse_args()
    write_warm_up(given.out, given.model, given.per_function)


def write_warm_up(out: Path, model: Path, per_function: int) -> None:
    """Write rows for `minisandbox train sft`: bugs in functions that no task is made of, and their fixes."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = []
    for mutant in mutants_of(functions_apart(TaskSet.load("quickstart"), above=SHARES, seed=0), per_function, 0):
        ids, mask = encode(tokenizer, mutant.view, mutant.fix.text)
        lines.append(json.dumps({"input_ids": ids, "loss_mask": mask, "traj_id": mutant.digest}))
    part = out.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in lines))
    part.replace(out)
    print(f"{out}: {len(lines)} answers of the oracle", flush=True)


if __name__ == "__main__":
    main()
