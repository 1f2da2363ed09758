"""Seconds of the second step of reinforcement learning with the embedded model, next to an earlier commit, in turn.

    git archive 414e1d8 src | tar -x -C /tmp/before
    python -m benchmarks.training_speed --before /tmp/before [--pairs N]

Two tasks with two rollouts each, of two turns with 24 tokens, without sandboxes. The first step, which also allocates
the optimiser's state, is printed in brackets. The earlier commit runs with OMP_NUM_THREADS=1, and this one with its
default number of threads. Needs the extra [train], and trl for 414e1d8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.models import Message, Model, Request, Sampling, TokenGraph
from minisandbox.models.engine import fetch_model
from minisandbox.train.config import Checkpoints, Groups, Policy, RlConfig
from minisandbox.train.groups import Result, Wanted

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Conversations:
    """Rollouts of two turns with prescribed rewards, as an environment of the training loop."""

    tasks: Sequence[str] = ("a", "b")
    held_out: Sequence[str] = ()
    began: list[float] = field(default_factory=list)

    def rollouts(self, model: Model, *, held_out: bool) -> Conversations:  # noqa: ARG002 - of the protocol
        """Return this object, which uses the model."""
        self._model = model
        return self

    async def run(self, wanted: Wanted) -> Result:
        """Run a rollout."""
        self.began.append(time.monotonic())
        graph, messages = TokenGraph(), [Message("user", f"Fix the bug in {wanted.task}.py. " * 20)]
        for _ in range(2):
            sampling = Sampling(max_tokens=24, temperature=1.0, seed=wanted.seed)
            answer = await self._model.complete(Request(tuple(messages), sampling=sampling, session=wanted.name))
            assert answer.tokens is not None
            graph.add(answer.tokens)
            messages += [answer.message, Message("user", "The tests still fail.")]
        return Result(wanted, float(wanted.attempt % 2), graph.rows())

    def close(self) -> None:
        """Do nothing."""


def measure() -> list[float]:
    """Return the seconds of two steps, from the first rollout to the end of the step."""
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - imports optional packages

    environment, ends = Conversations(), list[float]()
    with tempfile.TemporaryDirectory() as out:
        config = RlConfig(
            str(fetch_model()), ("none",), out, steps=2, groups=Groups(tasks=2, size=2, refill=0),
            policy=Policy(max_tokens=24), checkpoints=Checkpoints(every=1000), device="cpu",
        )  # fmt: skip
        train_rl(config, environment, tell=lambda text: ends.append(time.monotonic()) if " of 2: " in text else None)
    first, second = ends
    return [first - min(environment.began), second - min(began for began in environment.began if began > first)]


def measured(source: Path, **environment: str) -> list[float]:
    """Measure two steps in a new process with the sources of a commit."""
    variables = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.training_speed", "--one"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**variables, **environment, "PYTHONPATH": f"{source / 'src'}:{ROOT}"}, check=True,
    )  # fmt: skip
    seconds: list[float] = json.loads(run.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="directory with the earlier commit's src")
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--one", action="store_true", help="measure two steps in this process")
    options = parser.parse_args()
    if options.one:
        print(measure())
        return
    ratios = []
    for _ in range(options.pairs):
        before, now = measured(options.before, OMP_NUM_THREADS="1"), measured(ROOT)
        ratios.append(now[1] / before[1])
        shown = [f"{second:.1f} s ({first:.1f} s)" for first, second in (before, now)]
        print(f"load {os.getloadavg()[0]:.1f}: before {shown[0]}, now {shown[1]}, {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} on {len(os.sched_getaffinity(0))} CPUs")


if __name__ == "__main__":
    main()
