"""Run the whole experiment of docs/results.md; the same command resumes it.

    python -m examples.learning.experiment runs/learning

The experiment makes the base model and writes the oracle's answers. For each seed it then fine-tunes the model, trains
it by reinforcement learning in sandboxes, and evaluates it. Each stage is a command, which is printed. Finished stages
are skipped.
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
    """Configuration of an experiment.

    Attributes:
        out: output directory.
        seeds: seeds of the runs.
        rows: number of bugs to train the base model on.
        steps: number of reinforcement learning steps.
        train: the task set to train on.
        held_out: the task set to evaluate on.
        settings: further `KEY=VALUE` settings of reinforcement learning.
        likeliest: whether to also evaluate both models by their likeliest answers.
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
        """Run the unfinished stages."""
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

    def _train(self, kind: str, out: Path, settings: dict[str, object], user_settings: Sequence[str]) -> None:
        pairs = [*(f"{key}={value}" for key, value in settings.items()), *user_settings]
        options = [argument for pair in pairs for argument in ("--set", pair)]
        command = ["minisandbox", "train", kind, str(HERE / f"{kind}-mutations.yaml"), *options, "-o", str(out)]
        self._stage(out.name, out / "model" / "config.json", command)

    def _evaluate(self, name: str, model: Path) -> None:
        """Run one rollout of each held-out task, with the likeliest answer."""
        command = [
            "minisandbox", "rollout", str(self.held_out), "--agent", AGENT, "--model", f"local:{model}",
            "--temperature", "0", "--step-limit", "1", "--max-tokens", "8", "--workers", "4", "--quiet",
            "-o", str(self.out / name),
        ]  # fmt: skip
        self._stage(name, self.out / name / "done", command)
        (self.out / name / "done").touch()

    def _stage(self, name: str, result: Path, command: list[str]) -> None:
        """Run a Python module unless its result exists, and record its wall and CPU time."""
        if result.exists():
            return
        print(f"\n$ python -m {' '.join(command)}", flush=True)
        began, usage_before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.run([sys.executable, "-m", *command], env=environment, check=False).returncode
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime
        seconds = round(time.monotonic() - began, 1)
        record = {"stage": name, "seconds": seconds, "cpu": round(cpu, 1), "status": status}
        with (self.out / "times.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if status:
            raise SystemExit(f"{name} failed with status {status}; the same command resumes")


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description="fine-tune and train a small model, for several seeds")
    parser.add_argument("out", type=Path, help="output directory; an existing one is resumed")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="N")
    parser.add_argument("--rows", type=int, default=40_000, help="bugs to train the base model on")
    parser.add_argument("--steps", type=int, default=100, help="steps of reinforcement learning")
    parser.add_argument("--train", type=Path, default=TRAIN, metavar="TASKS")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, metavar="TASKS")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    Experiment(**vars(parser.parse_args())).run()


if __name__ == "__main__":
    main()
