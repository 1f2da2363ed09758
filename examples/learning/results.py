"""Write docs/results.md's tables and its curve from the directory of an experiment.

    python -m examples.learning.results runs/learning

What people wrote around the tables stays. A run that is still going on is shown as far as it is.
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
SHOWN = "![The resolve rate on held-out tasks, by optimiser steps](results.svg)"
PAGE, CURVE = DOCS / "results.md", DOCS / "results.svg"


@dataclass(frozen=True, slots=True)
class Seed:
    """What one seed came to.

    Attributes:
        number: of the seed.
        scores: the held-out resolve rate of answers drawn at temperature 1, by step.
        before: the rate of the likeliest answers after SFT, or None where it is not known.
        after: the same after reinforcement learning.
        rewards: the mean reward of each step.
        seconds: of the clock, for SFT and reinforcement learning with its evaluations.
        cpu: of a processor.
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
        """By how much the drawn answers' rate rose."""
        return self.scores[-1].reward - self.scores[0].reward


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description="write docs/results.md's tables and curve")
    parser.add_argument("run", type=Path, help="the directory of examples.learning.experiment")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--curve", type=Path, default=CURVE)
    given = parser.parse_args()
    seeds = list(read_seeds(given.run))
    if not seeds:
        raise SystemExit(f"{given.run} has no evaluation yet")
    draw_curve({f"seed {one.number}": one.scores for one in seeds}, given.curve)
    page = given.page.read_text()
    for name, text in (
        ("rates", f"{rates(seeds)}\n\n{SHOWN}"),
        ("course", course(seeds)),
        ("cost", cost(given.run, seeds)),
    ):
        page = with_part(page, name, text)
    given.page.write_text(page)
    print(rates(seeds))


def read_seeds(run: Path) -> Iterator[Seed]:
    """Yield what is known of each seed that has an evaluation."""
    times = _lines(run / "times.jsonl")
    for number in sorted(int(path.name.partition("-")[2]) for path in run.glob("rl-*")):
        scores = tuple(
            Score(int(one["step"]), float(one["reward"]), int(one["rollouts"]), int(one["failed"]))
            for one in _lines(run / f"rl-{number}" / "scores.jsonl")
        )
        rewards = tuple(float(one["reward"]) for one in _lines(run / f"rl-{number}" / "log.jsonl") if "reward" in one)
        own = [one for one in times if one["stage"] in (f"sft-{number}", f"rl-{number}")]
        if scores:
            rate = [_rate(run / f"likeliest-{kind}-{number}") for kind in ("sft", "rl")]
            seconds, cpu = (sum(float(one[key]) for one in own) for key in ("seconds", "cpu"))
            yield Seed(number, scores, rate[0], rate[1], rewards, seconds, cpu)


def rates(seeds: Sequence[Seed]) -> str:
    """The table of what was resolved before and after, and the means with the spread of the seeds."""
    lines = [
        "| seed | drawn, after SFT | drawn, after RL | rise | likeliest, after SFT | likeliest, after RL |",
        "|---|---|---|---|---|---|",
    ]
    for one in seeds:
        first, last = one.scores[0].reward, one.scores[-1].reward
        values = (f"{first:.1%}", f"{last:.1%}", _points(one.gain), _percent(one.before), _percent(one.after))
        lines.append(f"| {one.number} | " + " | ".join(values) + " |")
    columns = (
        [one.scores[0].reward for one in seeds], [one.scores[-1].reward for one in seeds], [one.gain for one in seeds],
        [one.before for one in seeds if one.before is not None], [one.after for one in seeds if one.after is not None],
    )  # fmt: skip
    means = [_percent(_mean(one)) for one in columns]
    means[2] = _points(statistics.fmean(columns[2]))
    lines.append("| mean | " + " | ".join(means) + " |")
    lines.append("| deviation of the seeds | " + " | ".join(_deviation(one) for one in columns) + " |")
    return "\n".join(lines)


def course(seeds: Sequence[Seed]) -> str:
    """The table of all evaluations, and of the reward of the steps between them."""
    steps = sorted({score.step for one in seeds for score in one.scores})
    lines = ["| | " + " | ".join(f"step {step}" for step in steps) + " |", "|---" * (len(steps) + 1) + "|"]
    for one in seeds:
        known = {score.step: score for score in one.scores}
        cells = [f"{known[step].reward:.1%} of {known[step].rollouts}" if step in known else "" for step in steps]
        lines.append(f"| seed {one.number}, held out | " + " | ".join(cells) + " |")
    for one in seeds:
        parts = [one.rewards[max(0, step - 10) : step] for step in steps]
        cells = [f"{statistics.fmean(part):.1%}" if part else "" for part in parts]
        lines.append(f"| seed {one.number}, reward of the ten steps before | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost(run: Path, seeds: Sequence[Seed]) -> str:
    """The table of what it took, and the machine."""
    lines = ["| stage | minutes | minutes of one processor |", "|---|---|---|"]
    for stage in ("base", "warm-up"):
        own = [one for one in _lines(run / "times.jsonl") if one["stage"] == stage]
        if own:
            lines.append(f"| {stage} | {float(own[-1]['seconds']) / 60:.1f} | {float(own[-1]['cpu']) / 60:.1f} |")
    lines += [f"| seed {one.number}: SFT and RL | {one.seconds / 60:.0f} | {one.cpu / 60:.0f} |" for one in seeds]
    return "\n".join([*lines, "", f"Machine: {machine()}."])


def machine() -> str:
    """The processor, how many of it, and the memory."""
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    size = int(memory[1]) / 2**20 if memory else 0
    return f"{len(os.sched_getaffinity(0))} x {names[0] if names else os.uname().machine}, {size:.0f} GiB, no GPU"


def _rate(run: Path) -> float | None:
    """The part of a run's rollouts that was resolved; None where it is not over."""
    if not (run / "done").exists():
        return None
    with RunReader(run) as reader:
        rewards = [one.reward for one in reader.summaries() if one.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def _lines(path: Path) -> list[dict[str, str]]:
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
