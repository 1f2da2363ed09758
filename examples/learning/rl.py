"""Train by reinforcement learning with one of the rewards that the experiment compares.

    python -m examples.learning.rl examples/learning/rl.yaml --reward naive --set model=DIR -o OUT

The configuration is that of ``minisandbox train rl``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.learning.environment import LearningEnvironment, Reward
from examples.learning.outcomes import Known

from minisandbox.tasks import TaskSet
from minisandbox.train.config import RlConfig
from minisandbox.train.options import load
from minisandbox.train.rl import train_rl


def main() -> None:
    """Train a model; the same command resumes."""
    parser = argparse.ArgumentParser(description="reinforcement learning with a reward of the experiment")
    parser.add_argument("config", help="a configuration of minisandbox train rl")
    parser.add_argument("--reward", type=Reward, choices=tuple(Reward), default=Reward.HIDDEN)
    parser.add_argument("--known", type=Path, required=True, help="the file of the tests' outcomes")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the run's directory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = load(RlConfig, args.config, [*args.settings, f"out={args.out}"])
    tasks = {task.instance_id: task for name in config.tasks for task in TaskSet.load(name)}
    environment = LearningEnvironment(config, tasks, args.reward, Known(args.known))
    result = train_rl(config, environment, tell=lambda text: print(text, flush=True))
    print(f"{result.steps} steps; the model is in {result.model}")


if __name__ == "__main__":
    main()
