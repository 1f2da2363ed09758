"""The experiment on a small slice, for two cores and twenty minutes: ``make train-demo``.

    python -m examples.learning.demo runs/train-demo

Train a small base model for a few minutes, fine-tune it, and train it by reinforcement learning on a few tasks of one
project. Each step repeats all of these tasks, so their reward reliably rises.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from examples.learning.experiment import HELD_OUT, TRAIN, Experiment
from examples.learning.results import read_seeds

from minisandbox.tasks import TaskSet

PROJECT = "tkem/cachetools"
TASKS = 8
SETTINGS = (
    f"groups.tasks={TASKS}", "groups.size=8", "optimizer.learning_rate=6e-4", "micro_batch=64", "evaluation.attempts=4",
    "evaluation.every=1000", "checkpoints.every=4",
)  # fmt: skip


def main() -> None:
    """Run the small experiment, and print the rewards before and after."""
    parser = argparse.ArgumentParser(description="fine-tune and train a small model on a small slice")
    parser.add_argument("out", type=Path, help="output directory; an existing one is resumed")
    out, began = parser.parse_args().out, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = _slice(TRAIN, out), _slice(HELD_OUT, out)
    Experiment(
        out, seeds=(1,), rows=6000, steps=12, train=train, held_out=held_out,
        settings=SETTINGS, likeliest=False,
    ).run()  # fmt: skip
    (seed,) = read_seeds(out)
    first_reward, last_reward = statistics.fmean(seed.rewards[:2]), statistics.fmean(seed.rewards[-2:])
    first_score, last_score = seed.scores[0], seed.scores[-1]
    print(f"\nreward on the training tasks: {first_reward:.3f} before, {last_reward:.3f} after (means of two steps)")
    resolved = f"{first_score.reward:.1%} before, {last_score.reward:.1%} after"
    print(f"resolved, held out: {resolved}, of {last_score.rollouts} rollouts")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; the model is in {out / 'rl-1' / 'model'}")


def _slice(source: Path, out: Path) -> Path:
    """Write the first tasks of one project to a file; all of them share an image."""
    tasks = TaskSet.load(source)
    path = out / source.name
    tasks.take([task.instance_id for task in tasks if task.repo == PROJECT][:TASKS]).save(path)
    return path


if __name__ == "__main__":
    main()
