"""The whole experiment of docs/results.md, by one command that goes on where it was stopped.

    python -m examples.learning.experiment runs/learning

It makes the base model, writes the oracle's answers, and for each seed fine-tunes, trains by reinforcement learning in
sandboxes and evaluates. Each stage is a command that it prints; one that is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEEDS = (1, 2, 3)
HERE = Path(__file__).parent
TRAIN, HELD_OUT = HERE / "data" / "mutations-train.jsonl", HERE / "data" / "mutations-held-out.jsonl"
AGENT = "examples.learning.word_edit:WordEditAgent"


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is done.

    Attributes:
        out: where it all goes.
        seeds: of the runs.
        rows: bugs that the base learns from.
        steps: of reinforcement learning.
        train: the task set to train on.
        held_out: the task set to evaluate on.
        settings: further `KEY=VALUE` of reinforcement learning.
        likeliest: whether both models are also evaluated by their likeliest answers.
    """

    out: Path
    seeds: Sequence[int] = SEEDS
    rows: int = 40_000
    steps: int = 100
    train: Path = TRAIN
    held_out: Path = HELD_OUT
    settings: Sequence[str] = ()
    likeliest: bool = True

    def run(self) -> None:
        """Do what is not done yet."""
        base, warm_up = self.out / "base", self.out / "warm-up.jsonl"
        self.out.mkdir(parents=True, exist_ok=True)
        self._stage("base", base / "config.json", ["examples.learning.base", str(base), "--rows", str(self.rows)])
        self._stage("warm-up", warm_up, ["examples.learning.oracle", str(warm_up), "--model", str(base)])
        for seed in self.seeds:
            sft, rl = self.out / f"sft-{seed}", self.out / f"rl-{seed}"
            settings = {"model": base, "data": f"[{warm_up}]", "seed": seed}
            self._train("sft", sft, settings, ())
            settings = {
                "model": sft / "model", "tasks": f"[{self.train}]", "evaluation.tasks": f"[{self.held_out}]",
                "steps": self.steps, "seed": seed,
            }  # fmt: skip
            self._train("rl", rl, settings, self.settings)
            if self.likeliest:
                self._evaluate(f"likeliest-sft-{seed}", sft / "model")
                self._evaluate(f"likeliest-rl-{seed}", rl / "model")

    def _train(self, kind: str, out: Path, settings: dict[str, object], more: Sequence[str]) -> None:
        given = [f"{key}={value}" for key, value in settings.items()]
        options = [part for one in (*given, *more) for part in ("--set", one)]
        command = ["minisandbox", "train", kind, str(HERE / f"{kind}-mutations.yaml"), *options, "-o", str(out)]
        self._stage(out.name, out / "model" / "config.json", command)

    def _evaluate(self, name: str, model: Path) -> None:
        """One rollout of each held-out task, with the likeliest answer."""
        command = [
            "minisandbox", "rollout", str(self.held_out), "--agent", AGENT, "--model", f"local:{model}",
            "--temperature", "0", "--step-limit", "1", "--max-tokens", "8", "--workers", "4", "--quiet",
            "-o", str(self.out / name),
        ]  # fmt: skip
        self._stage(name, self.out / name / "done", command)
        (self.out / name / "done").touch()

    def _stage(self, name: str, result: Path, module: list[str]) -> None:
        """Run a module of Python unless its result is there, and note what it took."""
        if result.exists():
            return
        print(f"\n$ python -m {' '.join(module)}", flush=True)
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run([sys.executable, "-m", *module], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        line = {
            "stage": name,
            "seconds": round(time.monotonic() - began, 1),
            "cpu": round(cpu, 1),
            "status": ended.returncode,
        }
        with (self.out / "times.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if ended.returncode:
            raise SystemExit(f"{name} ended with {ended.returncode}; the same command goes on")


def main() -> None:
    """Do the experiment."""
    parser = argparse.ArgumentParser(description="fine-tune and train a small model, for several seeds")
    parser.add_argument("out", type=Path, help="where it all goes; the same directory goes on")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="N")
    parser.add_argument("--rows", type=int, default=40_000, help="bugs that the base learns from")
    parser.add_argument("--steps", type=int, default=100, help="of reinforcement learning")
    parser.add_argument("--train", type=Path, default=TRAIN, metavar="TASKS")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, metavar="TASKS")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    Experiment(**vars(given)).run()


if __name__ == "__main__":
    main()
