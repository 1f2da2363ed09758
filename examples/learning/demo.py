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

from examples.learning.choose import records
from examples.learning.experiment import HELD_OUT, TRAIN, Experiment, Subject

from minisandbox.tasks import TaskSet

PROJECT = "mahmoud/boltons"
TASKS = 8
SETTINGS = ("optimizer.learning_rate=6e-4", "micro_batch=64", "checkpoints.every=4")


def main() -> None:
    """Run the small experiment, and print the rewards before and after."""
    parser = argparse.ArgumentParser(description="fine-tune and train a small model on a small slice")
    parser.add_argument("out", type=Path, help="output directory; an existing one is resumed")
    out, began = parser.parse_args().out, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = _slice(TRAIN, out), _slice(HELD_OUT, out)
    llama = Subject(arms=("sft", "hidden"), steps=16, attempts=4, rl=SETTINGS)
    Experiment(out, seeds=(1,), rows=6000, train=train, held_out=held_out, llama=llama).run()
    rewards = [float(str(line["reward"])) for line in records(out / "rl-hidden-1" / "log.jsonl")]
    before, after = statistics.fmean(rewards[:2]), statistics.fmean(rewards[-2:])
    print(f"\nreward on the training tasks: {before:.3f} before, {after:.3f} after (means of two steps)")
    rates = [_rate(records(out / f"eval-{arm}-1.jsonl")) for arm in ("sft", "hidden")]
    print(f"resolved, held out: {rates[0]:.1%} before, {rates[1]:.1%} after")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; the model is in {out / 'rl-hidden-1' / 'model'}")


def _rate(rollouts: list[dict[str, object]]) -> float:
    return statistics.fmean(float(str(rollout["honest"])) for rollout in rollouts if rollout["honest"] is not None)


def _slice(source: Path, out: Path) -> Path:
    """Write the first tasks of one project to a file."""
    tasks = TaskSet.load(source)
    path = out / source.name
    tasks.take([task.instance_id for task in tasks if task.repo == PROJECT][:TASKS]).save(path)
    return path


if __name__ == "__main__":
    main()
