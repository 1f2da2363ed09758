"""Write the tables and the curve of docs/results.md from the directory of an experiment.

    python -m examples.learning.results runs/learning

The text around the tables stays. The finished part of an unfinished run is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.pages import with_part

from minisandbox.rollouts import RunReader
from minisandbox.train.evaluation import Score, draw_curve

DOCS = Path(__file__).resolve().parents[2] / "docs"
CURVE_LINK = "![The resolve rate on held-out tasks, by optimiser steps](results.svg)"
PAGE, CURVE = DOCS / "results.md", DOCS / "results.svg"


@dataclass(frozen=True, slots=True)
class Seed:
    """Results of one seed.

    Attributes:
        number: the seed.
        scores: the held-out resolve rate of answers drawn at temperature 1, by step.
        before: the rate of the likeliest answers after SFT; None if it was not measured.
        after: the rate of the likeliest answers after reinforcement learning; None if it was not measured.
        rewards: the mean reward of each step.
        seconds: wall seconds of SFT and reinforcement learning, with its evaluations.
        cpu: CPU seconds.
    """

    number: int
    scores: tuple[Score, ...]
    before: float | None
    after: float | None
    rewards: tuple[float, ...]
    seconds: float
    cpu: float

    @property
    def gain(self) -> float:
        """The increase of the drawn answers' rate."""
        return self.scores[-1].reward - self.scores[0].reward


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description="write docs/results.md's tables and curve")
    parser.add_argument("run", type=Path, help="the directory of examples.learning.experiment")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--curve", type=Path, default=CURVE)
    args = parser.parse_args()
    seeds = list(read_seeds(args.run))
    if not seeds:
        raise SystemExit(f"{args.run} has no evaluation yet")
    draw_curve({f"seed {seed.number}": seed.scores for seed in seeds}, args.curve)
    page = args.page.read_text()
    for name, text in (
        ("rates", f"{rates(seeds)}\n\n{CURVE_LINK}"),
        ("course", course(seeds)),
        ("cost", cost(args.run, seeds)),
    ):
        page = with_part(page, name, text)
    args.page.write_text(page)
    print(rates(seeds))


def read_seeds(run: Path) -> Iterator[Seed]:
    """Yield the results of each seed that has an evaluation."""
    stages = _records(run / "times.jsonl")
    for number in sorted(int(path.name.partition("-")[2]) for path in run.glob("rl-*")):
        scores = tuple(
            Score(int(record["step"]), float(record["reward"]), int(record["rollouts"]), int(record["failed"]))
            for record in _records(run / f"rl-{number}" / "scores.jsonl")
        )
        log = _records(run / f"rl-{number}" / "log.jsonl")
        rewards = tuple(float(record["reward"]) for record in log if "reward" in record)
        seed_stages = [stage for stage in stages if stage["stage"] in (f"sft-{number}", f"rl-{number}")]
        if scores:
            before, after = (_rate(run / f"likeliest-{kind}-{number}") for kind in ("sft", "rl"))
            seconds, cpu = (sum(float(stage[key]) for stage in seed_stages) for key in ("seconds", "cpu"))
            yield Seed(number, scores, before, after, rewards, seconds, cpu)


def rates(seeds: Sequence[Seed]) -> str:
    """Return the table of resolve rates before and after training, with means and standard deviations."""
    lines = [
        "| seed | drawn, after SFT | drawn, after RL | rise | likeliest, after SFT | likeliest, after RL |",
        "|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        first_rate, last_rate = seed.scores[0].reward, seed.scores[-1].reward
        gain, before, after = _points(seed.gain), _percent(seed.before), _percent(seed.after)
        lines.append(f"| {seed.number} | {first_rate:.1%} | {last_rate:.1%} | {gain} | {before} | {after} |")
    columns = (
        [seed.scores[0].reward for seed in seeds],
        [seed.scores[-1].reward for seed in seeds],
        [seed.gain for seed in seeds],
        [seed.before for seed in seeds if seed.before is not None],
        [seed.after for seed in seeds if seed.after is not None],
    )
    means = [_percent(_mean(column)) for column in columns]
    means[2] = _points(statistics.fmean(columns[2]))
    lines.append("| mean | " + " | ".join(means) + " |")
    lines.append("| deviation of the seeds | " + " | ".join(_deviation(column) for column in columns) + " |")
    return "\n".join(lines)


def course(seeds: Sequence[Seed]) -> str:
    """Return the table of all evaluations, and of the rewards of the steps before them."""
    steps = sorted({score.step for seed in seeds for score in seed.scores})
    lines = ["| | " + " | ".join(f"step {step}" for step in steps) + " |", "|---" * (len(steps) + 1) + "|"]
    for seed in seeds:
        scores = {score.step: score for score in seed.scores}
        cells = [f"{scores[step].reward:.1%} of {scores[step].rollouts}" if step in scores else "" for step in steps]
        lines.append(f"| seed {seed.number}, held out | " + " | ".join(cells) + " |")
    for seed in seeds:
        windows = [seed.rewards[max(0, step - 10) : step] for step in steps]
        cells = [f"{statistics.fmean(window):.1%}" if window else "" for window in windows]
        lines.append(f"| seed {seed.number}, reward of the ten steps before | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost(run: Path, seeds: Sequence[Seed]) -> str:
    """Return the table of wall and CPU time, and the description of the machine."""
    lines = ["| stage | minutes | minutes of one processor |", "|---|---|---|"]
    for name in ("base", "warm-up"):
        stages = [stage for stage in _records(run / "times.jsonl") if stage["stage"] == name]
        if stages:
            seconds, cpu = float(stages[-1]["seconds"]), float(stages[-1]["cpu"])
            lines.append(f"| {name} | {seconds / 60:.1f} | {cpu / 60:.1f} |")
    lines += [f"| seed {seed.number}: SFT and RL | {seed.seconds / 60:.0f} | {seed.cpu / 60:.0f} |" for seed in seeds]
    return "\n".join([*lines, "", f"Machine: {machine()}."])


def machine() -> str:
    """Return the number and model of the CPUs, and the memory."""
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    size = int(memory[1]) / 2**20 if memory else 0
    return f"{len(os.sched_getaffinity(0))} x {names[0] if names else os.uname().machine}, {size:.0f} GiB, no GPU"


def _rate(run: Path) -> float | None:
    """Return the resolve rate of a run; None if the run is unfinished."""
    if not (run / "done").exists():
        return None
    with RunReader(run) as reader:
        rewards = [summary.reward for summary in reader.summaries() if summary.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def _records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points"


def _deviation(values: Sequence[float]) -> str:
    return f"{100 * statistics.stdev(values):.1f} points" if len(values) > 1 else ""


if __name__ == "__main__":
    main()
