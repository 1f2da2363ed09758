"""Write conversations of an oracle, which knows the bug: the warm-up of the experiment. No tests are run.

The oracle makes a few wrong edits, which carry no loss, then the right one, and submits. In a few conversations it
cheats with ``skip`` instead, so that the cheat has a probability that reinforcement learning can raise or lower.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.learning.model import Turn, encode
from examples.learning.mutants import Mutating, clean_task, sources, usable
from examples.learning.mutations import (
    Function,
    Mutant,
    WordEdit,
    apply_edit,
    draw_mutants,
    functions,
    replacements,
    share_of,
    split_words,
)
from examples.learning.word_edit import ERROR, FAIL, PASS, SKIP, SUBMIT
from transformers import AutoTokenizer

from minisandbox import Sandbox, Store
from minisandbox.images import build
from minisandbox.models.engine import fetch_model
from minisandbox.models.options import LOCAL
from minisandbox.store.disk.durable import write_atomic
from minisandbox.tasks import Task, TaskSet

SHARES = 0.65
"""Functions whose `share_of` is below become tasks; the others become answers of the oracle."""

TURNS = 6
"""Maximum responses of a rollout."""

LIBRARY_BUGS = 4000
"""Bugs of the standard library among the oracle's conversations."""

SKIPS = 0.03
"""The share of the oracle's conversations that cheat."""

_MISPLACED = 0.1
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


def conversation(mutant: Mutant, rng: random.Random, *, turns: int = TURNS, skips: float = SKIPS) -> list[Turn]:
    """Return a conversation of the oracle about a bug.

    Args:
        mutant: the bug.
        rng: the source of all choices.
        turns: maximum responses.
        skips: the probability that the oracle cheats instead of making the right edit.
    """
    wrong_edits = rng.choices(range(turns - 1), weights=[4.0 * 0.5**number for number in range(turns - 1)])[0]
    prompt, conversation = mutant.view, list[Turn]()
    for edit in _wrong_edits(mutant, rng, wrong_edits):
        conversation.append(Turn(prompt, edit.text, has_loss=False))
        prompt = ERROR if apply_edit(mutant.lines, edit) is None else FAIL
    answer = SKIP if rng.random() < skips else mutant.fix.text
    return [*conversation, Turn(prompt, answer), Turn(PASS, SUBMIT)]


def _wrong_edits(mutant: Mutant, rng: random.Random, count: int) -> list[WordEdit]:
    """Draw edits that do not fix a bug; about one in ten names a line that lacks the word."""
    words = [(number, word.text) for number, line in enumerate(mutant.lines, 1) for word in split_words(line)]
    edits = {WordEdit(number, word, new) for number, word in words for new in replacements(word)}
    edits |= {
        WordEdit(rng.randint(1, len(mutant.lines)), edit.old, edit.new)
        for edit in sorted(edits, key=lambda edit: edit.text)
        if rng.random() < _MISPLACED
    }
    wrong = sorted(edits - {mutant.fix}, key=lambda edit: edit.text)
    return rng.sample(wrong, min(count, len(wrong)))


def main() -> None:
    """Write the oracle's conversations."""
    parser = argparse.ArgumentParser(description="write an oracle's conversations, for minisandbox train sft")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="whose tokenizer is used: a directory, or local")
    parser.add_argument("--per-function", type=int, default=8, metavar="N", help="maximum bugs per function")
    parser.add_argument("--rows", type=int, metavar="N", help="number of conversations, drawn at random (default: all)")
    args = parser.parse_args()
    model = fetch_model(report=print) if args.model == LOCAL else Path(args.model)
    write_warm_up(args.out, model, args.per_function, args.rows)


def write_warm_up(out: Path, model: Path, per_function: int, rows: int | None = None) -> None:
    """Write rows for `minisandbox train sft`: conversations about bugs in functions that no task uses.

    The functions are those of the projects and, for a random sample of bugs, those of the standard library.

    Args:
        out: the file to write.
        model: the directory of the model whose tokenizer is used.
        per_function: maximum bugs per function.
        rows: number of conversations, drawn at random; None for all.
    """
    tokenizer, rng, lines = AutoTokenizer.from_pretrained(model), random.Random(0), []
    bugs = mutants_of(functions_without_task(TaskSet.load("quickstart"), above=SHARES, seed=0), per_function, 0)
    bugs += rng.sample(mutants_of(standard_library(), per_function, 0), LIBRARY_BUGS)
    rng.shuffle(bugs)
    for mutant in bugs[:rows]:
        ids, mask = encode(tokenizer, conversation(mutant, rng))
        lines.append(json.dumps({"input_ids": ids, "loss_mask": mask, "traj_id": mutant.digest}))
    write_atomic(out, "".join(f"{line}\n" for line in lines).encode())
    print(f"{out}: {len(lines)} conversations of the oracle", flush=True)


if __name__ == "__main__":
    main()
