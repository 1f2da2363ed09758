"""Make the model that experiments start from: it learns to read code, and the grammar, from bugs in Python's library.

    python -m examples.learning.base OUT

One pass over the bugs, in batches of like length; AdamW for the embeddings, Muon for the layers' matrices. The loss is
that of the oracle's answers and, with less weight, that of the code.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from examples.learning.model import encode, make_model, train_tokenizer
from examples.learning.oracle import mutants_of, standard_library
from transformers import LlamaForCausalLM

Row = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Training:
    """How the base is trained.

    Attributes:
        seed: of the weights, the bugs and their order.
        per_function: bugs of one function.
        rows: at most.
        batch: rows of a step.
        muon: step size of the matrices.
        adam: step size of the rest.
        code: weight of the code's loss.
    """

    seed: int = 0
    per_function: int = 8
    rows: int = 40_000
    batch: int = 32
    muon: float = 0.02
    adam: float = 3e-3
    code: float = 0.2


def main() -> None:
    """Make a base model."""
    parser = argparse.ArgumentParser(description="make the model that experiments start from")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=Training().rows, help="bugs to learn from")
    parser.add_argument("--muon", type=float, default=Training().muon)
    parser.add_argument("--code", type=float, default=Training().code)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make_base(given.out, Training(seed=given.seed, rows=given.rows, muon=given.muon, code=given.code))


def make_base(out: Path, how: Training) -> None:
    """Train a model from nothing and save it with its tokenizer, unless it is there."""
    if (out / "config.json").exists():
        return
    torch.set_num_threads(1)
    found = mutants_of(standard_library(), how.per_function, how.seed)
    random.Random(how.seed).shuffle(found)
    found = found[: how.rows]
    tokenizer = train_tokenizer([one.view for one in found[::8]])
    model = make_model(len(tokenizer), seed=how.seed)
    print(json.dumps({"rows": len(found), "parameters": model.num_parameters()}), flush=True)
    rows = [encode(tokenizer, one.view, one.fix.text) for one in found]
    _train(model, rows, how)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)  # the last: it is what says that all is there


def _train(model: LlamaForCausalLM, rows: Sequence[Row], how: Training) -> None:
    batches = _batches(rows, how)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=how.muon, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=how.adam, weight_decay=0.0, betas=(0.9, 0.98)),
    ]

    def pace(step: int) -> float:
        return min(1.0, (step + 1) / 30) * max(0.02, 1 - step / len(batches))

    schedules = [torch.optim.lr_scheduler.LambdaLR(one, pace) for one in optimizers]
    began, total = time.process_time(), 0.0
    model.train()
    for number, batch in enumerate(batches, 1):
        loss, own = _loss(model, batch, how.code)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += own
        if number % 50 == 0 or number == len(batches):
            seconds = round(time.process_time() - began, 1)
            print(
                json.dumps({"step": number, "of": len(batches), "loss": round(total / 50, 4), "cpu": seconds}),
                flush=True,
            )
            total = 0.0


def _batches(rows: Sequence[Row], how: Training) -> list[Sequence[Row]]:
    """Batches of rows of like length, in any order: little is padded."""
    rng = random.Random(how.seed)
    ordered = sorted(rows, key=lambda row: len(row[0]) + 20 * rng.random())
    found: list[Sequence[Row]] = [ordered[start : start + how.batch] for start in range(0, len(ordered), how.batch)]
    rng.shuffle(found)
    return found


def _loss(model: LlamaForCausalLM, batch: Sequence[Row], code: float) -> tuple[torch.Tensor, float]:
    """The loss that is trained on, and that of the answers alone. Rows are padded on the right: the mask is causal."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([one + [0] * (width - len(one)) for one, _ in batch])
    own = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in batch])[:, 1:] == 1
    seen = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one, _ in batch])[:, 1:] == 1
    hidden, targets = model.model(input_ids=ids).last_hidden_state[:, :-1], ids[:, 1:]
    answers = torch.nn.functional.cross_entropy(model.lm_head(hidden[own]), targets[own])
    if not code:
        return answers, answers.item()
    rest = seen & ~own
    around = torch.nn.functional.cross_entropy(model.lm_head(hidden[rest]), targets[rest])
    return answers + code * around, answers.item()


if __name__ == "__main__":
    main()
