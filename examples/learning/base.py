"""Make the model that experiments start from: it learns to read code, and the grammar, from bugs in Python's library.

    python -m examples.learning.base OUT

Train one epoch on the bugs, in batches of similar length, with AdamW for the embeddings and Muon for the matrices of
the layers. The loss adds the loss of the oracle's answers and, with less weight, the loss of the code.
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
from examples.learning.model import Turn, encode, make_model, train_tokenizer
from examples.learning.oracle import mutants_of, standard_library
from transformers import LlamaForCausalLM

Row = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Training:
    """Hyperparameters of the base model.

    Attributes:
        seed: seed of the weights, the bugs and their order.
        per_function: bugs per function.
        rows: maximum number of bugs.
        batch: rows per step.
        muon: learning rate of the matrices.
        adam: learning rate of the other parameters.
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
    args = parser.parse_args()
    make_base(args.out, Training(seed=args.seed, rows=args.rows, muon=args.muon, code=args.code))


def make_base(out: Path, training: Training) -> None:
    """Train a model from random weights and save it with its tokenizer, unless it exists."""
    if (out / "config.json").exists():
        return
    torch.set_num_threads(1)
    mutants = mutants_of(standard_library(), training.per_function, training.seed)
    random.Random(training.seed).shuffle(mutants)
    mutants = mutants[: training.rows]
    tokenizer = train_tokenizer([mutant.view for mutant in mutants[::8]])
    model = make_model(len(tokenizer), seed=training.seed)
    print(json.dumps({"rows": len(mutants), "parameters": model.num_parameters()}), flush=True)
    rows = [encode(tokenizer, [Turn(mutant.view, mutant.fix.text)]) for mutant in mutants]
    _train(model, rows, training)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)  # save the model last, because its config.json marks the directory as complete


def _train(model: LlamaForCausalLM, rows: Sequence[Row], training: Training) -> None:
    batches = _batches(rows, training)
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    other_weights = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=training.muon, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(other_weights, lr=training.adam, weight_decay=0.0, betas=(0.9, 0.98)),
    ]

    def learning_rate_factor(step: int) -> float:
        return min(1.0, (step + 1) / 30) * max(0.02, 1 - step / len(batches))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor) for optimizer in optimizers]
    began, total_loss = time.process_time(), 0.0
    model.train()
    for step, batch in enumerate(batches, 1):
        loss, answer_loss = _loss(model, batch, training.code)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total_loss += answer_loss
        if step % 50 == 0 or step == len(batches):
            seconds = round(time.process_time() - began, 1)
            print(
                json.dumps({"step": step, "of": len(batches), "loss": round(total_loss / 50, 4), "cpu": seconds}),
                flush=True,
            )
            total_loss = 0.0


def _batches(rows: Sequence[Row], training: Training) -> list[Sequence[Row]]:
    """Return batches of rows of similar length, in random order; similar lengths need little padding."""
    rng = random.Random(training.seed)
    ordered = sorted(rows, key=lambda row: len(row[0]) + 20 * rng.random())
    batches: list[Sequence[Row]] = [
        ordered[start : start + training.batch] for start in range(0, len(ordered), training.batch)
    ]
    rng.shuffle(batches)
    return batches


def _loss(model: LlamaForCausalLM, batch: Sequence[Row], code_weight: float) -> tuple[torch.Tensor, float]:
    """Return the training loss, and the loss of the answers alone.

    Rows are padded on the right, which the causal attention mask makes harmless.
    """
    width = max(len(row_ids) for row_ids, _ in batch)
    ids = torch.tensor([row_ids + [0] * (width - len(row_ids)) for row_ids, _ in batch])
    answer_mask = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in batch])[:, 1:] == 1
    token_mask = torch.tensor([[1] * len(row_ids) + [0] * (width - len(row_ids)) for row_ids, _ in batch])[:, 1:] == 1
    hidden, targets = model.model(input_ids=ids).last_hidden_state[:, :-1], ids[:, 1:]
    answer_loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[answer_mask]), targets[answer_mask])
    if not code_weight:
        return answer_loss, answer_loss.item()
    code_mask = token_mask & ~answer_mask
    code_loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[code_mask]), targets[code_mask])
    return answer_loss + code_weight * code_loss, answer_loss.item()


if __name__ == "__main__":
    main()
