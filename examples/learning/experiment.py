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

from minisandbox.models.engine import fetch_model
from minisandbox.models.options import LOCAL

SEEDS = (1, 2)
ARMS = ("sft", "hidden", "rejection", "naive", "shuffled", "tempered")
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
HERE = Path(__file__).parent
TRAIN, HELD_OUT = HERE / "data" / "mutations-train.jsonl", HERE / "data" / "mutations-held-out.jsonl"
GROUPS = 8
"""Tasks per step of reinforcement learning."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is trained, and its budget.

    Attributes:
        prefix: the beginning of the stages' names.
        arms: the arms.
        steps: steps of reinforcement learning.
        size: rollouts per task and step.
        attempts: rollouts per held-out task.
        turns: maximum responses per rollout.
        max_tokens: maximum tokens per response.
        sft: settings of fine-tuning on the oracle's conversations.
        rejection: settings of fine-tuning on the passes of rejection sampling.
        rl: settings of reinforcement learning.
    """

    prefix: str = ""
    arms: Sequence[str] = ARMS
    steps: int = 60
    size: int = 8
    attempts: int = 16
    turns: int = 6
    max_tokens: int = 8
    sft: Sequence[str] = ()
    rejection: Sequence[str] = ("epochs=2", "batch_size=32", "optimizer.learning_rate=2e-4")
    rl: Sequence[str] = ()


LLAMA = Subject()
SMOLLM = Subject(
    "smollm-", ("sft", "hidden", "rejection"), steps=16, size=4, attempts=4, turns=8, max_tokens=16,
    sft=("epochs=2", "batch_size=8", "optimizer.learning_rate=1e-4"),
    rejection=("epochs=2", "batch_size=8", "optimizer.learning_rate=2e-5"),
    rl=("optimizer.learning_rate=2e-5", "optimizer.warmup_steps=2", "loss_length=60", "micro_batch=4",
        "checkpoints.every=2"),
)  # fmt: skip
"""The embedded model, SmolLM2-135M-Instruct."""

SMOLLM_ROWS = 600
"""Conversations of the oracle for the embedded model."""


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
        smollm: whether to train the embedded model too, with seed 1.
        rows: number of bugs to train the base model on.
        train: the task set to train on.
        held_out: the task set to evaluate on.
        llama: the small model's budget.
    """

    out: Path
    seeds: Sequence[int] = SEEDS
    arms: Sequence[str] = ARMS
    parallel: int = 1
    smollm: bool = False
    rows: int = 40_000
    train: Path = TRAIN
    held_out: Path = HELD_OUT
    llama: Subject = LLAMA
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Run the unfinished stages."""
        self.out.mkdir(parents=True, exist_ok=True)
        base, warm_up = self.out / "base", self.out / "warm-up.jsonl"
        oracle = "examples.learning.oracle"
        if self.seeds:
            self._run([
                Stage("base", base / "config.json", lambda: ["examples.learning.base", base, "--rows", self.rows]),
                Stage("warm-up", warm_up, lambda: [oracle, warm_up, "--model", base]),
            ])  # fmt: skip
            self._run_arms(self.llama, self.seeds, str(base), warm_up)
        if self.smollm:
            warm_up = self.out / "smollm-warm-up.jsonl"
            command = [oracle, warm_up, "--model", LOCAL, "--rows", SMOLLM_ROWS]
            self._run([Stage(warm_up.stem, warm_up, lambda: command)])
            self._run_arms(SMOLLM, (1,), str(fetch_model(report=print)), warm_up)

    def _run_arms(self, subject: Subject, seeds: Sequence[int], base: str, warm_up: Path) -> None:
        arms = [arm for arm in subject.arms if arm in self.arms]
        with ThreadPoolExecutor(self.parallel) as pool:
            sft = [[self._sft(f"{subject.prefix}sft-{seed}", base, warm_up, seed, *subject.sft)] for seed in seeds]
            list(pool.map(self._run, sft))
            list(pool.map(self._run, [self.stages(subject, arm, seed) for seed in seeds for arm in arms]))

    def stages(self, subject: Subject, arm: str, seed: int) -> Iterator[Stage]:
        """Yield the stages of an arm, after the fine-tuning on the oracle's conversations."""
        out, prefix = self.out, subject.prefix
        model = sft = out / f"{prefix}sft-{seed}" / "model"
        temperature = 1.0
        if arm in ("hidden", "shuffled", "naive"):
            model = out / f"{prefix}rl-{arm}-{seed}" / "model"
            yield self._rl(subject, arm, seed, sft)
        elif arm == "rejection":
            drawn, rows = out / f"{prefix}drawn-{seed}.jsonl", out / f"{prefix}passes-{seed}.jsonl"
            like_rl = ["--like-rl", subject.steps, GROUPS]
            yield self._sample(subject, drawn, sft, self.train, subject.size, 1.0, seed, *like_rl)
            yield Stage(rows.stem, rows, lambda: ["examples.learning.choose", "rows", drawn, "-o", rows])
            yield self._sft(f"{prefix}rejection-{seed}", str(sft), rows, seed, *subject.rejection)
            model = out / f"{prefix}rejection-{seed}" / "model"
        elif arm == "tempered":
            files = {number: out / f"{prefix}at-{number}-{seed}.jsonl" for number in TEMPERATURES}
            for number, path in files.items():
                yield self._sample(subject, path, sft, self.train, 4, number, seed, "--first", 96)
            chosen = out / f"{prefix}temperature-{seed}.json"
            pairs = [f"{number}={path}" for number, path in files.items()]
            command = ["examples.learning.choose", "temperature", *pairs, "-o", chosen]
            yield Stage(chosen.stem, chosen, lambda: command)
            temperature = float(str(records(chosen)[0]["temperature"]))
        rollouts = out / f"eval-{prefix}{arm}-{seed}.jsonl"
        yield self._sample(subject, rollouts, model, self.held_out, subject.attempts, temperature, seed)

    def _rl(self, subject: Subject, arm: str, seed: int, model: Path) -> Stage:
        out = self.out / f"{subject.prefix}rl-{arm}-{seed}"
        settings = [
            f"model={model}", f"tasks=[{self.train}]", f"steps={subject.steps}", f"seed={seed}",
            f"groups.tasks={GROUPS}", f"groups.size={subject.size}", f"policy.steps={subject.turns}",
            f"policy.max_tokens={subject.max_tokens}", *subject.rl,
        ]  # fmt: skip
        options = [argument for setting in settings for argument in ("--set", setting)]
        known = ["--known", self.out / "known.sqlite"]
        command = ["examples.learning.rl", HERE / "rl.yaml", "--reward", arm, *known, *options, "-o", out]
        return Stage(out.name, out / "model" / "config.json", lambda: command)

    def _sft(self, name: str, model: str, data: Path, seed: int, *settings: str) -> Stage:
        out = self.out / name
        pairs = [f"model={model}", f"data=[{data}]", f"seed={seed}", *settings]
        options = [argument for pair in pairs for argument in ("--set", pair)]
        command = ["minisandbox", "train", "sft", HERE / "sft.yaml", *options, "-o", out]
        return Stage(name, out / "model" / "config.json", lambda: command)

    def _sample(
        self, subject: Subject, out: Path, model: Path, tasks: Path, attempts: int, temperature: float, seed: int,
        *options: object,
    ) -> Stage:  # fmt: skip
        command = [
            "examples.learning.sample", model, tasks, "--attempts", attempts, "--temperature", temperature,
            "--seed", seed, "--turns", subject.turns, "--max-tokens", subject.max_tokens,
            "--known", self.out / "known.sqlite", *options, "-o", out,
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
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, metavar="N")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="arms that run at once, one thread each")
    parser.add_argument("--smollm", action="store_true", help="train the embedded model too, once, in 3 CPU hours")
    parser.add_argument("--rows", type=int, default=40_000, help="bugs to train the base model on")
    parser.add_argument("--train", type=Path, default=TRAIN, metavar="TASKS")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, metavar="TASKS")
    Experiment(**vars(parser.parse_args())).run()


if __name__ == "__main__":
    main()
