"""Run the whole experiment of docs/results.md; the same command resumes it.

    python -m examples.learning.experiment runs/learning --seeds 1 2 --parallel 2

The experiment makes the base model and the oracle's conversations. For each seed it fine-tunes the model, then trains
and evaluates the arms. Each stage is a command, which is printed. Finished stages are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from examples.learning.choose import records

SEEDS = (1, 2)
ARMS = ("sft", "hidden", "rejection", "naive", "shuffled", "tempered")
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
HERE = Path(__file__).parent
TRAIN, HELD_OUT = HERE / "data" / "mutations-train.jsonl", HERE / "data" / "mutations-held-out.jsonl"
STEPS, GROUPS, SIZE = 60, 8, 8
"""Steps of reinforcement learning, tasks per step and rollouts per task, as in rl.yaml."""

REJECTION = ("epochs=2", "batch_size=32", "optimizer.learning_rate=2e-4")
"""Settings of fine-tuning on the passes of rejection sampling."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A command of the experiment.

    Attributes:
        name: the stage's name.
        result: the file that exists once the stage has finished.
        command: returns a Python module with its arguments; called when the stage starts.
    """

    name: str
    result: Path
    command: Callable[[], Sequence[object]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Configuration of an experiment.

    Attributes:
        out: output directory.
        seeds: seeds of the runs.
        arms: the arms to run.
        parallel: number of arms that run at once, with one thread each.
        rows: number of bugs to train the base model on.
        steps: number of reinforcement learning steps.
        attempts: rollouts per held-out task.
        train: the task set to train on.
        held_out: the task set to evaluate on.
        settings: further `KEY=VALUE` settings of reinforcement learning.
    """

    out: Path
    seeds: Sequence[int] = SEEDS
    arms: Sequence[str] = ARMS
    parallel: int = 1
    rows: int = 40_000
    steps: int = STEPS
    attempts: int = 16
    train: Path = TRAIN
    held_out: Path = HELD_OUT
    settings: Sequence[str] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Run the unfinished stages."""
        self.out.mkdir(parents=True, exist_ok=True)
        base, warm_up = self.out / "base", self.out / "warm-up.jsonl"
        self._run([
            Stage("base", base / "config.json", lambda: ["examples.learning.base", base, "--rows", self.rows]),
            Stage("warm-up", warm_up, lambda: ["examples.learning.oracle", warm_up, "--model", base]),
        ])  # fmt: skip
        with ThreadPoolExecutor(self.parallel) as pool:
            list(pool.map(self._run, [[self._sft(f"sft-{seed}", base, warm_up, seed)] for seed in self.seeds]))
            list(pool.map(self._run, [self.stages(arm, seed) for seed in self.seeds for arm in self.arms]))

    def stages(self, arm: str, seed: int) -> Iterator[Stage]:
        """Yield the stages of an arm, after the fine-tuning on the oracle's conversations."""
        model = sft = self.out / f"sft-{seed}" / "model"
        temperature = 1.0
        if arm in ("hidden", "shuffled", "naive"):
            model = self.out / f"rl-{arm}-{seed}" / "model"
            yield self._rl(arm, seed, sft)
        elif arm == "rejection":
            drawn, rows = self.out / f"drawn-{seed}.jsonl", self.out / f"passes-{seed}.jsonl"
            like_rl = ["--like-rl", self.steps, GROUPS]
            yield self._sample(drawn, sft, self.train, SIZE, 1.0, seed, *like_rl)
            yield Stage(rows.stem, rows, lambda: ["examples.learning.choose", "rows", drawn, "-o", rows])
            yield self._sft(f"rejection-{seed}", sft, rows, seed, *REJECTION)
            model = self.out / f"rejection-{seed}" / "model"
        elif arm == "tempered":
            files = {number: self.out / f"at-{number}-{seed}.jsonl" for number in TEMPERATURES}
            for number, path in files.items():
                yield self._sample(path, sft, self.train, 4, number, seed, "--first", 96)
            chosen = self.out / f"temperature-{seed}.json"
            pairs = [f"{number}={path}" for number, path in files.items()]
            yield Stage(chosen.stem, chosen, lambda: ["examples.learning.choose", "temperature", *pairs, "-o", chosen])
            temperature = float(str(records(chosen)[0]["temperature"]))
        rollouts = self.out / f"eval-{arm}-{seed}.jsonl"
        yield self._sample(rollouts, model, self.held_out, self.attempts, temperature, seed)

    def _rl(self, arm: str, seed: int, model: Path) -> Stage:
        out = self.out / f"rl-{arm}-{seed}"
        settings = [f"model={model}", f"tasks=[{self.train}]", f"steps={self.steps}", f"seed={seed}", *self.settings]
        options = [argument for setting in settings for argument in ("--set", setting)]
        known = ["--known", self.out / "known.sqlite"]
        command = ["examples.learning.rl", HERE / "rl.yaml", "--reward", arm, *known, *options, "-o", out]
        return Stage(out.name, out / "model" / "config.json", lambda: command)

    def _sft(self, name: str, model: Path, data: Path, seed: int, *settings: str) -> Stage:
        out = self.out / name
        pairs = [f"model={model}", f"data=[{data}]", f"seed={seed}", *settings]
        options = [argument for pair in pairs for argument in ("--set", pair)]
        command = ["minisandbox", "train", "sft", HERE / "sft.yaml", *options, "-o", out]
        return Stage(name, out / "model" / "config.json", lambda: command)

    def _sample(
        self, out: Path, model: Path, tasks: Path, attempts: int, temperature: float, seed: int, *options: object
    ) -> Stage:
        command = [
            "examples.learning.sample", model, tasks, "--attempts", attempts, "--temperature", temperature,
            "--seed", seed, "--known", self.out / "known.sqlite", *options, "-o", out,
        ]  # fmt: skip
        return Stage(out.stem, out, lambda: command)

    def _run(self, stages: Iterable[Stage]) -> None:
        """Run stages in order, and record their wall and CPU time. A stage may depend on the files of earlier ones.

        Raises:
            SystemExit: a stage failed.
        """
        for stage in stages:
            if stage.result.exists():
                continue
            command = [str(argument) for argument in stage.command()]
            print(f"\n$ python -m {' '.join(command)}", flush=True)
            began = time.monotonic()
            with (self.out / f"{stage.name}.log").open("a") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )  # fmt: skip
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            seconds, cpu = round(time.monotonic() - began, 1), round(usage.ru_utime + usage.ru_stime, 1)
            record = {"stage": stage.name, "seconds": seconds, "cpu": cpu, "status": process.returncode}
            with self._lock, (self.out / "times.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
            if process.returncode:
                raise SystemExit(f"{stage.name} failed: see {stage.name}.log; the same command resumes")


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description="compare ways to train a small model, for several seeds")
    parser.add_argument("out", type=Path, help="output directory; an existing one is resumed")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="N")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="arms that run at once, one thread each")
    parser.add_argument("--rows", type=int, default=40_000, help="bugs to train the base model on")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of reinforcement learning")
    parser.add_argument("--attempts", type=int, default=16, help="rollouts per held-out task")
    parser.add_argument("--train", type=Path, default=TRAIN, metavar="TASKS")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, metavar="TASKS")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    Experiment(**vars(parser.parse_args())).run()


if __name__ == "__main__":
    main()
